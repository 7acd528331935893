#!/usr/bin/env bash
# All checks that need a GPU, in parts. Runs all parts, or those named:
#
#   dev/gpu/check.sh [--sitting 1|2] [PART...]
#
#   build        the trainer, the tests, the kernel ladders and the op table, with nvcc
#   memory       the GPU memory that a run takes, beside the plan
#   train        short runs against the CPU's, and the text that the trained models write
#   determinism  the same run twice has the same bits
#   resume       a stopped and resumed run has the bits of an uninterrupted one
#   graphs       with and without CUDA graphs: the same bits
#   ranks        the self-test of two ranks that share the GPU
#   nccl         two and four processes that share the GPU, with NCCL, against one rank; NCCL 2.30 or newer
#   test         every op and kernel, and the whole trainer, against the CPU's
#   sanitize     compute-sanitizer on the ops and on short runs: bad accesses, uninitialised memory, barriers
#   racecheck    the same, for races
#   kernels      the kernel ladders
#   ops          each op of a training step against the GPU's measured roofline
#   stalls       Nsight Compute on kernels below the roofline: what their warps wait for
#   switches     tokens/s of GPT-2 124M with each switch (--gelu, --residual, ...) beside runs without it
#   e2e          training steps compared with PyTorch: parts e2e-124M, e2e-1558M, e2e-qwen and e2e-experts
#
# --sitting 1 checks correctness: all parts but the last five lines, at the same time where possible. --sitting 2
# measures speed, one part after the other. Each takes at most SITTING_SECONDS=570, the build included.
#
# Programs are built in the background, and a part begins when its own are ready. A check that fails, or takes too long,
# stops no other. Every result is in OUT/checks.tsv as soon as it is known, and all output in OUT/log.txt; kernels, ops,
# switches and e2e also write Markdown tables. The table of all results comes last. Exit status 1: something failed.
#
# Environment: OUT=build/gpu-out, for a sitting build/gpu-out/sitting-N   JOBS=processors   ARCH=the GPU's
# DEPS=build/gpu-deps (from dev/gpu/pack_deps.sh, if the machine lacks packages)   PYTHON=python3 (with torch, for e2e)
# MORE_SECONDS=1: times all limits
# NO_BUILD=1: use programs built elsewhere   DEVICE=cpu: try this script without a GPU
# SMALL=1: tiny models and few steps, as for the emulated GPU (dev/gpu/rehearse.sh)
set -uo pipefail
CDPATH='' cd "$(dirname "$0")/../.." || exit

DEPS=${DEPS:-build/gpu-deps} JOBS=${JOBS:-$(nproc)} DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
MORE_SECONDS=${MORE_SECONDS:-1}
SITTING_SECONDS=${SITTING_SECONDS:-$((570 * MORE_SECONDS))}
RUNS=build/gpu-runs
PATH=$PATH:/usr/local/cuda/bin   # compute-sanitizer and ncu; make finds nvcc there, too
export XDG_CACHE_HOME=$PWD/build/cache
export OMP_WAIT_POLICY=passive   # else the trainer re-executes itself to set it, which confuses sanitizers
if [ -d "$DEPS" ]; then
  DEPS=$(CDPATH='' cd "$DEPS" && pwd)
  export CPLUS_INCLUDE_PATH=$DEPS/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
  export LIBRARY_PATH=$DEPS/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  export LD_LIBRARY_PATH=$DEPS/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# Seconds since this machine has started: bash's SECONDS follow the time of day, which may jump.
now() {
  local seconds
  read -r seconds _ </proc/uptime
  echo "${seconds%.*}"
}
began=$(now)

# The time limit of a part in seconds, without the build.
limit_of() {
  case $1 in
    build) echo 420 ;;
    memory) echo 60 ;;
    train | determinism | resume | graphs) echo 120 ;;
    nccl) echo 200 ;;
    test) echo 150 ;;
    ranks | sanitize | racecheck) echo 240 ;;
    kernels | stalls) echo 90 ;;
    switches) echo 270 ;;
    ops | e2e-124M) echo 120 ;;
    e2e-*) echo 150 ;;
  esac
}

# ---- Checks ----------------------------------------------------------------------------------------------------------

# row STATUS SECONDS CHECK NOTE: a row of the results, for the part $part
row() {
  printf '%s\t%s\t%s\t%s\t%s\n' "$part" "$1" "$2" "$3" "$4" >>"$OUT/checks.tsv"
  printf '%-11s %-7s %4s s  %-34s %s\n' "$part" "$1" "$2" "$3" "$4"
}

left() { echo $(((part_end < sitting_end ? part_end : sitting_end) - $(now))); }

# reason OUTPUT: its last line; of a compiler the first error
reason() {
  [[ $part == build* ]] && grep -aEm 1 'error *:|undefined reference' "$1" && return
  grep -av '^ *$' "$1" | tail -n 1
}

# check NAME SECONDS COMMAND...: status 0 means ok, 77 that it cannot be tried here. The note is the last line that
# begins with "note:" or is the summary of a test program or a sanitizer; else the error. The command is killed after
# SECONDS, or when the part's time is up, with all that it started: `timeout` alone waits only for the command, and a
# trainer that catches SIGTERM would still use the GPU during the next check.
summaries='^note:|^========= .*SUMMARY|^All tests passed|^test cases:|^self-test:'
check() {
  local name=$1 limit=$(($2 * MORE_SECONDS)) output=$RUNS/$part.output status=0 begin note scratch group seconds
  begin=$(now)
  shift 2
  [ "$limit" -le "$(left)" ] || limit=$(left)
  if [ "$limit" -le 0 ]; then
    row skipped 0 "$name" 'no time left'
    return 1
  fi
  scratch=$(mktemp -d)
  TMPDIR=$scratch timeout --kill-after=10 "$limit" "$@" >"$output" 2>&1 </dev/null &
  group=$!
  trap 'kill -s KILL -- "-$group"; rm -rf "$scratch"; exit 130' INT TERM
  wait "$group" 2>/dev/null || status=$?   # bash would print that it was killed
  trap - INT TERM
  kill -s KILL -- "-$group" 2>/dev/null
  rm -rf "$scratch"
  { printf '\n==== %s: %s: %s\n' "$part" "$name" "$*" && cat "$output"; } >"$RUNS/$part.more"
  flock "$OUT/log.txt" -c "cat '$RUNS/$part.more' >>'$OUT/log.txt'"
  seconds=$(($(now) - begin))
  note=$(grep -aE "$summaries" "$output" | tail -n 1 | sed -E 's/^(note:|=========) *//')
  case $status in
    0) row ok $seconds "$name" "$note" ;;
    77) row skipped $seconds "$name" "$note" ;;
    124 | 137) row FAILED $seconds "$name" "stopped after $limit s" ;;
    *) [ -n "$note" ] || note=$(reason "$output" | tr '\t' ' ' | cut -c 1-160)
      row FAILED $seconds "$name" "status $status: $note" ;;
  esac
  [ "$status" -eq 0 ]
}

# ---- Building --------------------------------------------------------------------------------------------------------

programs=(train_gpt build/test_cuda_on_gpu build/ladders build/op_table)
mark_of() { echo "$RUNS/built/${1##*/}"; }

# build JOBS PROGRAM...: builds them one after the other, and marks each as "ok" or "failed".
build() {
  local jobs=$1 part=build-${2##*/} program made
  for program in "${@:2}"; do
    made=failed
    # shellcheck disable=SC2086    # words
    ! check "build $program" "$(limit_of build)" make -j"$jobs" DEVICE="$DEVICE" ${ARCH:+ARCH=$ARCH} \
      "$program" || made=ok
    echo $made >"$(mark_of "$program")"
  done
}

# Builds these programs in the background, all at once, but the tests and the ladders, which share objects, one after
# the other. The CPU's ops, which all of them share, come first.
start_builds() {
  local part=build part_end=$(($(now) + $(limit_of build) * MORE_SECONDS)) program tests=()
  rm -rf "$RUNS/built" && mkdir -p "$RUNS/built"
  if ! { check 'look at the machine' 120 make DEVICE="$DEVICE" config &&
    check "build the CPU's ops" 120 make -j"$JOBS" DEVICE="$DEVICE" build/cpu/all; }; then
    for program in "$@"; do echo failed >"$(mark_of "$program")"; done
    return
  fi
  for program in "$@"; do
    case $program in
      build/test_cuda_on_gpu) tests=("$program" "${tests[@]}") ;;
      build/ladders) tests+=("$program") ;;
      *) build 1 "$program" & ;;
    esac
  done
  [ ${#tests[@]} -eq 0 ] || build $((JOBS > 3 ? JOBS - 2 : 1)) "${tests[@]}" &
}

# built PROGRAM...: waits until they are built. The part's time begins then.
built() {
  local name mark lacking
  for name in "$@"; do
    if [ -n "${NO_BUILD:-}" ]; then
      [ -x "$name" ] || { row FAILED 0 "$name" 'NO_BUILD is set, and it is not there' && return 1; }
      lacking=$(ldd "$name" 2>&1 | sed -nE "s/^\s*(.*) => not found$/\1/p; s/.*version \`(.*)' not found.*/\1/p" |
        sort -u | paste -sd ' ')
      [ -z "$lacking" ] || { row FAILED 0 "$name" "does not start without $lacking" && return 1; }
      continue
    fi
    mark=$(mark_of "$name")
    until [ -s "$mark" ]; do
      [ "$(now)" -lt "$sitting_end" ] || { row skipped 0 "$name" 'was not built in time' && return 1; }
      sleep 0.5
    done
    [ "$(cat "$mark")" = ok ] || { row FAILED 0 "$name" 'was not built' && return 1; }
  done
  part_end=$(($(now) + $(limit_of "$part") * MORE_SECONDS))
}

# The programs that a part runs.
programs_of() {
  case $1 in
    build) echo "${programs[@]}" ;;
    test | racecheck) echo build/test_cuda_on_gpu ;;
    sanitize) echo train_gpt build/test_cuda_on_gpu ;;
    kernels) echo build/ladders ;;
    ops | stalls) echo build/op_table ;;
    *) echo train_gpt ;;
  esac
}

# ---- The parts -------------------------------------------------------------------------------------------------------

# trained WHAT MODEL DTYPE [OPTIONS...]
trained() {
  local options=${*:4}
  check "$1 $2 $3${options:+ ${options//--/}}" 120 \
    "$PYTHON" dev/gpu/check_training.py "$1" --model "$2" --dtype "$3" --device "$DEVICE" --folder "$RUNS" \
    ${SMALL:+--small} "${@:4}"
}
every_model() {
  local model dtype
  for model in gpt2 llama experts; do
    for dtype in fp32 bf16; do
      # In bf16, another device may decide near ties of a router differently.
      [ "$1 $model $dtype" = 'against-cpu experts bf16' ] || trained "$1" "$model" "$dtype"
    done
  done
}

memory() {
  local model
  for model in gpt2 llama experts; do trained memory "$model" bf16; done
}
train() {
  every_model against-cpu
  local model
  for model in gpt2 llama experts; do trained generate "$model" fp32; done
}
nccl() {
  local processes layout
  for processes in 2 4; do
    for layout in all-reduce zero-3 tp pp cp ep; do
      trained processes "$([ $layout = ep ] && echo experts || echo gpt2)" fp32 --processes $processes --layout $layout
      [ -z "$(awk -F '\t' '$1 == "nccl" && $2 == "skipped"' "$OUT/checks.tsv")" ] || return   # the others are, too
    done
  done
}
ranks() {
  local ranks=2   # an H200 takes 51 s for two, over 150 s for four
  [ -z "${SMALL:-}" ] || ranks=1
  check "self-test of up to $ranks ranks" 240 ./train_gpt --selftest --device "$DEVICE" --local-ranks $ranks
}

test_ops() {
  check 'every op against the CPU' 100 build/test_cuda_on_gpu '[cuda]~[trainer]' --durations yes
  check 'the trainer against the CPU' 100 build/test_cuda_on_gpu '[trainer]' --durations yes
}

# sanitized TOOL NAME SECONDS COMMAND...
sanitized() {
  if [ -z "${SMALL:-}" ] && ! command -v compute-sanitizer >/dev/null; then
    row skipped 0 "$1: $2" 'it takes compute-sanitizer, from the CUDA toolkit'
    return
  fi
  local tool=$1 name=$2 limit=$3 command=(compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 --report-api-errors no)
  shift 3
  # racecheck skips the large kernels of other libraries; initcheck must see what they write.
  [ "$tool" != racecheck ] || ! grep -q -e --kernel-name <<<"$(compute-sanitizer --help)" || command+=(--kernel-name kns=llmc)
  [ -z "${SMALL:-}" ] || command=()   # it finds no kernel of an emulated GPU
  check "$tool: $name" "$limit" "${command[@]}" "$@"
}
# short_runs TOOL [DTYPE...]
short_runs() {
  [ $# -gt 1 ] || set -- "$1" bf16 fp32
  local tool=$1 dtypes=("${@:2}") dtype shape
  PYTHONPATH=dev "$PYTHON" -c "import train_files
train_files.write_shard('$RUNS/tokens-$tool.bin', (i * 7919 % 257 for i in range(4000)))"
  for shape in 'd2 --n-embd 128' 'qwen3:0.6B --n-layer 2 --n-embd 128 --n-head 4 --n-kv-head 2' 'd2-e4 --n-embd 128'; do
    for dtype in "${dtypes[@]}"; do
      [[ $tool != synccheck && $shape != d2-e4* || $dtype = bf16 || $tool = racecheck ]] || continue
      rm -rf "$RUNS/sanitized-$tool"
      # shellcheck disable=SC2086    # words
      sanitized "$tool" "${shape%% *} $dtype" 60 ./train_gpt --device "$DEVICE" -i "$RUNS/tokens-$tool.bin" \
        --model $shape --vocab-size 257 --dtype "$dtype" --local-ranks 1 -b 2 -t 64 -x 2 -o "$RUNS/sanitized-$tool"
    done
  done
}
sanitize() {
  local tool
  for tool in memcheck initcheck; do sanitized $tool 'the ops' 100 build/test_cuda_on_gpu '[cuda]~[trainer]'; done
  for tool in memcheck initcheck synccheck; do short_runs $tool; done
}
# Not in bf16, nor cuBLASLt's products: on Hopper racecheck dies of them, although it is told to look at ours alone.
racecheck() {
  built train_gpt || return
  sanitized racecheck 'the ops' 150 build/test_cuda_on_gpu '[cuda]~[trainer]~[matmul]'
  short_runs racecheck fp32
}

# kept FILE: keeps the output of the part's check, if it ran
kept() { [ ! -e "$RUNS/$part.output" ] || cp "$RUNS/$part.output" "$OUT/$1"; }

kernels() {
  check 'ladders' 90 build/ladders ${SMALL:+--small}
  kept ladders.md
}
ops() {
  # shellcheck disable=SC2086    # words
  check 'each op against the roofline' 120 build/op_table --json "$OUT/op_table.jsonl" ${OP_TABLE_FLAGS:-}
  kept op_table.md
  grep -as '^A step of these ops' "$OUT/op_table.md"
}

stalls() {
  if [ -n "${SMALL:-}" ] || ! command -v ncu >/dev/null; then
    row skipped 0 'what warps wait for' 'it takes ncu, from Nsight Compute, and a GPU'
    return
  fi
  # :4: op_table launches a kernel three times to warm up and then, with --repeats 1, once
  check 'what warps wait for' 90 ncu --clock-control none \
    --kernel-id '::regex:attention_|cross_entropy|norm_backward|column_sum:4' --section SpeedOfLight \
    --section WarpStateStats --section SchedulerStats --section SourceCounters --print-details all \
    build/op_table --models gpt2:124M --repeats 1 --long-sequence 0
  kept stalls.txt
}

switches() {
  check 'each switch on and off' 270 "$PYTHON" dev/gpu/switches.py --device "$DEVICE" --folder "$RUNS" \
    --out "$OUT/switches.md" ${SMALL:+--small --steps 6}
  grep -as '^|' "$OUT/switches.md"
}

# beside_pytorch CASE
beside_pytorch() {
  local modules=torch
  [[ $1 != *-e* ]] || modules='torch, transformers'
  if ! "$PYTHON" -c "import $modules" 2>/dev/null; then
    row skipped 0 "$1 against PyTorch" "PYTHON=$PYTHON cannot import $modules"
    return
  fi
  # shellcheck disable=SC2086    # words
  check "$1 against PyTorch" 150 "$PYTHON" dev/bench/compare.py --device "$DEVICE" --cases "$1" --rounds 2 \
    --seconds $(($(left) / 3)) --out "$RUNS/$part.md" ${BENCH_FLAGS:-}
  [ ! -s "$RUNS/$part.md" ] || { cat "$RUNS/$part.md" >>"$OUT/e2e.md" && grep -a '^|\|^- \| failed: ' "$RUNS/$part.md"; }
}

run_part() {
  local part=$1 part_end=$sitting_end
  case $part in build | kernels | ops | stalls | switches | e2e-*) wait ;; esac   # nothing else is to run while something is timed
  # shellcheck disable=SC2046    # words
  [ "$part" = build ] || built $(programs_of "$part") || return
  case $part in
    build) ;;
    memory | train | nccl | ranks | sanitize | racecheck | kernels | ops | stalls | switches) $part ;;
    determinism) every_model repeat ;;
    resume | graphs) every_model "$part" ;;
    test) test_ops ;;
    e2e-124M) beside_pytorch gpt2:124M ;;
    e2e-1558M) beside_pytorch gpt2:1558M ;;
    e2e-qwen) beside_pytorch qwen2.5:1.5B ;;
    e2e-experts) beside_pytorch d12-e8 ;;
  esac
}

# ---- What is wanted --------------------------------------------------------------------------------------------------

refuse() {
  echo "check.sh: $*" >&2
  exit 1
}
all=(build memory train determinism resume graphs ranks nccl 'test' sanitize racecheck kernels ops stalls switches
  e2e-124M e2e-1558M e2e-qwen e2e-experts)
lanes=() parts=() sitting_end=$((began + 1000000)) sitting=
if [ "${1:-}" = --sitting ]; then
  sitting_end=$((began + SITTING_SECONDS)) sitting=${2:-}
  case $sitting in
    # memory runs by itself, since it looks at free memory; then the parts that share the GPU.
    1) parts=(memory) lanes=('train determinism resume graphs' 'ranks nccl' 'test sanitize racecheck') ;;
    # Their limits are twice a sitting: what has no time left is of least interest.
    2) parts=(e2e-124M switches ops stalls kernels e2e-1558M e2e-qwen e2e-experts) ;;
    *) refuse "--sitting '$sitting' is unknown; use 1 or 2" ;;
  esac
  [ $# -eq 2 ] || refuse "--sitting has its own parts: leave out '${*:3}'"
elif [ $# -eq 0 ]; then
  parts=("${all[@]}")
fi
[ $# -eq 0 ] || [ "$1" = --sitting ] || for argument in "$@"; do
  if [ "$argument" = e2e ]; then
    parts+=(e2e-124M e2e-1558M e2e-qwen e2e-experts)
  elif [[ " ${all[*]} " = *" $argument "* ]]; then
    parts+=("$argument")
  else
    refuse "unknown part '$argument'; use ${all[*]} or e2e"
  fi
done

OUT=${OUT:-build/gpu-out${sitting:+/sitting-$sitting}}
one_line() { "$@" 2>/dev/null | sed -n 1p | tr '\t' ' '; }
mkdir -p "$OUT" "$RUNS"
{
  printf '# host\t%s, %s processors, %s\n' "$(uname -sr)" "$(nproc)" "$(one_line sed -n 's/^model name.*: //p' /proc/cpuinfo)"
  printf '# gpu\t%s\n' "$(one_line nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)"
  printf '# nvcc\t%s\n' "$("${NVCC:-nvcc}" --version 2>/dev/null | sed -n 's/.*, V//p')"
  printf '# c++\t%s\n' "$(one_line "${CXX:-g++}" --version)"
} >"$OUT/checks.tsv"
cat "$OUT/checks.tsv"
: >"$OUT/log.txt"
# Results of an earlier call.
rm -f "$OUT"/{ladders,op_table,switches,e2e}.md "$OUT"/{op_table.jsonl,stalls.txt} "$RUNS"/*.{output,md}

# shellcheck disable=SC2046,SC2048,SC2086    # words
[ -n "${NO_BUILD:-}" ] || start_builds $(for part in "${parts[@]}" ${lanes[*]}; do programs_of $part; done | tr ' ' '\n' | sort -u)
for part in "${parts[@]}"; do run_part "$part"; done
for lane in "${lanes[@]}"; do
  # shellcheck disable=SC2086    # words
  (for part in $lane; do run_part "$part"; done) &
done
wait

echo
awk -F '\t' '!/^#/ { printf "%-11s %-7s %4s s  %-34s %s\n", $1, $2, $3, $4, $5; ++of[$2] }
  END { printf "%d ok, %d failed, %d skipped in %d s\n", of["ok"], of["FAILED"], of["skipped"], '$(($(now) - began))' }' "$OUT/checks.tsv"
! grep -q $'^[^#]*\tFAILED\t' "$OUT/checks.tsv"
