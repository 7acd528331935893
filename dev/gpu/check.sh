#!/usr/bin/env bash
# Everything that needs a GPU to check, in independent parts of less than ten minutes each, build included:
#
#   dev/gpu/check.sh [PART...]      default: all, in this order
#
#   build      the trainer, the tests, the kernel ladders and the op table, with nvcc
#   ops        every op and kernel against the CPU's
#   train      short runs against the CPU's, repeated, stopped and resumed, without graphs; the self-test of four ranks
#   sanitize   compute-sanitizer's tools on the ops and on short runs: parts sanitize-ops and sanitize-train
#   kernels    the kernel ladders; each op against the GPU's measured roofline
#   e2e        training steps compared with PyTorch: parts e2e-124M, e2e-1558M, e2e-qwen and e2e-experts
#
# When a check fails, the part continues. Each part ends with a table; the tables of all parts come last. A part writes
# OUT/PART.log and OUT/PART.json; kernels and e2e also write Markdown tables. Exit status 1: something failed.
#
# Environment: OUT=build/gpu-out  DEPS=build/gpu-deps (from dev/gpu/pack_deps.sh, if the machine lacks packages)
# PART_SECONDS=570  JOBS=processors  PYTHON=python3 (with torch, for e2e)  ARCH=the GPU's
# NO_BUILD=1: use programs built elsewhere   DEVICE=cpu: try this script without a GPU
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

OUT=${OUT:-build/gpu-out} DEPS=${DEPS:-build/gpu-deps} JOBS=${JOBS:-$(nproc)} DEVICE=${DEVICE:-cuda}
PART_SECONDS=${PART_SECONDS:-570}
PYTHON=${PYTHON:-python3}
RUNS=build/gpu-runs output=build/gpu-runs/output   # output: of the last check
export XDG_CACHE_HOME=$PWD/build/cache
export OMP_WAIT_POLICY=passive   # else the trainer re-executes itself to set it, which confuses sanitizers
if [ -d "$DEPS" ]; then
  DEPS=$(cd "$DEPS" && pwd)
  export CPLUS_INCLUDE_PATH=$DEPS/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
  export LIBRARY_PATH=$DEPS/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  export LD_LIBRARY_PATH=$DEPS/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
mkdir -p "$OUT" "$RUNS"

# ---- Checks and their table ------------------------------------------------------------------------------------------

# One line per check of a part: status, seconds, name, note.
rows='' tables='' failed=0

row() {
  rows+="$1"$'\t'"$2"$'\t'"$3"$'\t'"$4"$'\n'
  [ "$1" != FAILED ] || failed=1
  printf '%-7s %5s s  %-32s %s\n' "$1" "$2" "$3" "$4"
}

# check NAME SECONDS COMMAND...: status 0 means ok. The note is the last line that begins with "note:" or is the summary
# of a test program or a sanitizer; else the error. The check is killed after SECONDS, or when the part's time is up.
summaries='^note:|^========= .*SUMMARY|^All tests passed|^test cases:'
check() {
  local name=$1 limit=$2 left status=0 begin=$SECONDS note
  shift 2
  left=$((part_end - SECONDS))
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    row FAILED 0 "$name" "no time left of the part's $PART_SECONDS s"
    return 1
  fi
  printf '\n==== %s: %s\n' "$name" "$*" >>"$log"
  timeout --kill-after=10 "$limit" "$@" >"$output" 2>&1 </dev/null || status=$?
  cat "$output" >>"$log"
  note=$(grep -aE "$summaries" "$output" | tail -n 1 | sed -E 's/^(note:|=========) *//')
  case $status in
    0) row ok $((SECONDS - begin)) "$name" "$note" ;;
    124 | 137) row FAILED $((SECONDS - begin)) "$name" "stopped after $limit s" ;;
    *) [ -n "$note" ] || note=$(grep -av '^ *$' "$output" | tail -n 1 | cut -c 1-160)
      row FAILED $((SECONDS - begin)) "$name" "status $status: $note" ;;
  esac
  [ "$status" -eq 0 ]
}
skip() { row skipped 0 "$1" "$2"; }

# made TARGET...: builds what a part needs; with NO_BUILD, checks that it exists.
made() {
  if [ -n "${NO_BUILD:-}" ]; then
    check 'programs built elsewhere' 5 ls -l "$@"
  else
    local onednn=0
    [ ! -e "$DEPS/lib/libdnnl.so" ] || onednn=1
    # shellcheck disable=SC2086    # words
    check "build $*" 540 make -j"$JOBS" DEVICE="$DEVICE" ONEDNN="${ONEDNN:-$onednn}" ${ARCH:+ARCH=$ARCH} "$@"
  fi
}

one_line() { "$@" 2>/dev/null | head -n 1 | tr '\t' ' '; }
machine() {
  printf 'host\t%s, %s processors, %s\n' "$(uname -sr)" "$(nproc)" \
    "$(one_line sed -n 's/^model name.*: //p' /proc/cpuinfo)"
  printf 'gpu\t%s\n' "$(one_line nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)"
  printf 'nvcc\t%s\n' "$("${NVCC:-nvcc}" --version 2>/dev/null | sed -n 's/.*, V//p')"
  printf 'c++\t%s\n' "$(one_line "${CXX:-g++}" --version)"
  printf 'train_gpt\t%s\n' "$([ ! -x train_gpt ] || one_line ./train_gpt --version)"
}

# part NAME
part() {
  local name=$1 begin=$SECONDS summary
  log=$OUT/$name.log part_end=$((SECONDS + PART_SECONDS)) rows=''
  printf '\n%s, at most %s s\n' "$name" "$PART_SECONDS"
  machine >"$log"
  case $name in
    build) made train_gpt build/test_cuda_on_gpu build/ladders build/op_table ;;
    ops) ops ;;
    train) train ;;
    sanitize-ops) sanitize_ops ;;
    sanitize-train) sanitize_train ;;
    kernels) kernels ;;
    e2e-124M) beside_pytorch gpt2:124M ;;
    e2e-1558M) beside_pytorch gpt2:1558M ;;
    e2e-qwen) beside_pytorch qwen2.5:1.5B ;;
    e2e-experts) beside_pytorch d12-e8 ;;
  esac
  summary=$(printf '%s: %s ok, %s failed, %s skipped, %s s' "$name" "$(grep -c '^ok' <<<"$rows")" \
    "$(grep -c '^FAILED' <<<"$rows")" "$(grep -c '^skipped' <<<"$rows")" $((SECONDS - begin)))
  tables+=$'\n'$summary$'\n'$(awk -F '\t' 'NF { printf "  %-7s %5s s  %-32s %s\n", $1, $2, $3, $4 }' <<<"$rows")$'\n'
  PART=$name SUMMARY=$summary MACHINE=$(machine) "$PYTHON" -c '
import json, os, sys
rows = [line.rstrip("\n").split("\t") for line in sys.stdin if line.strip()]
print(json.dumps({"part": os.environ["PART"], "summary": os.environ["SUMMARY"],
                  "machine": dict(line.split("\t", 1) for line in os.environ["MACHINE"].splitlines()),
                  "checks": [{"status": status, "seconds": int(seconds), "check": check, "note": note}
                             for status, seconds, check, note in rows]}, indent=1))' <<<"$rows" >"$OUT/$name.json"
}

# ---- The parts -------------------------------------------------------------------------------------------------------

ops() {
  made build/test_cuda_on_gpu || return
  check 'every op against the CPU' 400 build/test_cuda_on_gpu --durations yes
}

train() {
  made train_gpt || return
  local what model dtype
  for what in against-cpu repeat resume graphs; do
    for model in gpt2 llama experts; do
      for dtype in fp32 bf16; do
        # Rounded to bf16, near ties of a router fall otherwise on another device.
        [ "$what $model $dtype" != 'against-cpu experts bf16' ] || continue
        check "$what $model $dtype" 120 "$PYTHON" dev/gpu/check_training.py "$what" --model "$model" --dtype "$dtype" \
          --device "$DEVICE" --folder "$RUNS" ${STEPS:+--steps "$STEPS"}
      done
    done
  done
  for model in gpt2 llama experts; do
    check "generate $model fp32" 120 "$PYTHON" dev/gpu/check_training.py generate --model "$model" --device "$DEVICE" \
      --folder "$RUNS" ${STEPS:+--steps "$STEPS"}
  done
  check 'self-test of four ranks' 300 ./train_gpt --selftest --device "$DEVICE" --local-ranks 4
}

# sanitized NAME SECONDS TOOL COMMAND...
sanitized() {
  local name=$1 limit=$2 tool=$3 options=()
  shift 3
  # Not on the large kernels of other libraries; but initcheck must see what they write.
  [ "$tool" != racecheck ] || ! grep -q -e --kernel-name <<<"$(compute-sanitizer --help)" || options=(--kernel-name kns=llmc)
  check "$name" "$limit" compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 --print-limit 20 \
    --report-api-errors no "$@"
}

# with_sanitizer PROGRAM...
with_sanitizer() {
  command -v compute-sanitizer >/dev/null || {
    skip 'compute-sanitizer' 'is not installed'
    return 1
  }
  made "$@"
}

sanitize_ops() {
  with_sanitizer build/test_cuda_on_gpu || return
  local tool
  for tool in memcheck racecheck initcheck; do
    sanitized "$tool: the ops" 150 "$tool" build/test_cuda_on_gpu '[cuda]~[trainer]'
  done
}

sanitize_train() {
  with_sanitizer train_gpt || return
  "$PYTHON" - "$RUNS/tokens.bin" <<'PYTHON'
import struct, sys
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, 4000, *[0] * 253))
    file.write(struct.pack("<4000H", *(i * 7919 % 257 for i in range(4000))))
PYTHON
  local tool dtype shape
  for tool in memcheck racecheck initcheck synccheck; do
    for shape in 'd2 --n-embd 128' 'qwen3:0.6B --n-layer 2 --n-embd 128 --n-head 4 --n-kv-head 2' \
      'd2-e4 --n-embd 128'; do
      for dtype in bf16 fp32; do
        [[ $tool != synccheck && $shape != d2-e4* || $dtype = bf16 ]] || continue
        rm -rf "$RUNS/sanitized"
        # shellcheck disable=SC2086    # words
        sanitized "$tool: ${shape%% *} $dtype" 60 "$tool" ./train_gpt --device "$DEVICE" -i "$RUNS/tokens.bin" \
          --model $shape --vocab-size 257 --dtype "$dtype" --local-ranks 1 -b 2 -t 64 -x 2 -o "$RUNS/sanitized"
      done
    done
  done
}

kernels() {
  made build/ladders build/op_table || return
  check 'ladders' 120 build/ladders
  cp "$output" "$OUT/ladders.md"
  # shellcheck disable=SC2086    # words
  check 'each op against the roofline' 400 build/op_table --json "$OUT/op_table.jsonl" ${OP_TABLE_FLAGS:-}
  cp "$output" "$OUT/op_table.md"
  grep -a '^A step of these ops' "$output"
}

# beside_pytorch CASE
beside_pytorch() {
  made train_gpt || return
  local modules=torch
  [[ $1 != *-e* ]] || modules='torch, transformers'
  if ! "$PYTHON" -c "import $modules" 2>/dev/null; then
    skip "$1 against PyTorch" "PYTHON=$PYTHON cannot import $modules"
    return
  fi
  # shellcheck disable=SC2086    # words
  check "$1 against PyTorch" 540 "$PYTHON" dev/bench/compare.py --device "$DEVICE" --cases "$1" --rounds 2 \
    --seconds $((part_end - SECONDS - 20)) --out "$OUT/$name.md" ${BENCH_FLAGS:-}
  [ ! -s "$OUT/$name.md" ] || grep -a '^|\|^- ' "$OUT/$name.md"
}

parts=()
[ $# -gt 0 ] || set -- build ops train sanitize kernels e2e
for argument in "$@"; do
  case $argument in
    sanitize) parts+=(sanitize-ops sanitize-train) ;;
    e2e) parts+=(e2e-124M e2e-1558M e2e-qwen e2e-experts) ;;
    build | ops | train | sanitize-ops | sanitize-train | kernels | e2e-124M | e2e-1558M | e2e-qwen | \
      e2e-experts)
      parts+=("$argument") ;;
    *) echo "check.sh: unknown part '$argument'; use build ops train sanitize kernels e2e" >&2; exit 1 ;;
  esac
done
for argument in "${parts[@]}"; do part "$argument"; done
printf '%s' "$tables"
exit $failed
