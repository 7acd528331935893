#!/usr/bin/env bash
# dev/gpu/check.sh with programs that fail, are missing or do not end: no part stops another, every result is written,
# and a sitting keeps its time. Its scripts, with stand-ins for the trainer and PyTorch: what is known when a run fails or
# time is up is written.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
export TMPDIR=$dir/tmp
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir"/{dev/gpu,dev/bench,data,build,llmc,tmp,modules,bin,broken_bin}
: >"$dir/pids"
cp dev/gpu/check.sh dev/gpu/check_training.py dev/gpu/switches.py "$dir/dev/gpu/"
cp dev/bench/{checkpoint,compare,distributed,plan_accuracy}.py "$dir/dev/bench/"
cp dev/train_files.py "$dir/dev/"
cp data/{token_shards,programs}.py "$dir/data/"
cp llmc/core/log.h "$dir/llmc/"   # text to train on
fail() {
  echo "gpu_check_test: $*" >&2
  cat "$dir/out/checks.tsv" >&2
  exit 1
}
# Nothing is left of a check that was stopped: no process, of which stand-ins write the ids to pids, and no file.
require_gone() {
  local pid
  while read -r pid; do
    ! grep -qs '^State:.[^Z]' "/proc/$pid/status" || fail 'a trainer still runs after its check was stopped'
  done <"$dir/pids"
  [ -z "$(ls "$TMPDIR")" ] || fail 'a check that was stopped left temporary files'
}
programs=(train_gpt build/test_cuda_on_gpu build/ladders build/op_table)

# tried SITTING SECONDS SCRIPT...: each program is this script; without a script, all are missing.
tried() {
  local program begin=$SECONDS
  for program in "${programs[@]}"; do
    rm -f "$dir/$program"
    [ $# -eq 2 ] || { printf '#!/bin/sh\n%s\n' "${*:3}" >"$dir/$program" && chmod +x "$dir/$program"; }
  done
  ! NO_BUILD=1 SMALL=1 OUT=$dir/out SITTING_SECONDS=$2 "$dir/dev/gpu/check.sh" --sitting "$1" >"$dir/table" 2>&1 ||
    fail "status 0, though each program is broken: ${*:3}"
  [ $((SECONDS - begin)) -le $(($2 + 15)) ] || fail "a sitting of $2 s took $((SECONDS - begin)) s"
  ! grep -v '^#' "$dir/out/checks.tsv" | cut -f 2 | grep -x ok >/dev/null || fail "something is ok, though each program is broken"
  local parts=10
  [ "$1" = 1 ] || parts=8
  [ "$(grep -v '^#' "$dir/out/checks.tsv" | cut -f 1 | sort -u | wc -l)" -eq $parts ] || fail "not all $parts parts were tried"
  [ "$(tail -n 1 "$dir/table" | cut -d ' ' -f 2)" = 'ok,' ] || fail 'the table does not end with the sum'
}
tried 1 60 'echo "train_gpt: planted" >&2; exit 3'
grep -q $'^test\tFAILED\t.*status 3: train_gpt: planted' "$dir/out/checks.tsv" || fail 'the error is not in the table'
tried 2 60 'exit 3'
tried 1 60
grep -q $'^memory\tFAILED\t.*it is not there' "$dir/out/checks.tsv" || fail 'a missing program is not named'
tried 1 8 "trap '' TERM; echo \$\$ >>'$dir/pids'; mktemp -d; sleep 60"
grep -q $'^memory\tFAILED\t.*stopped after' "$dir/out/checks.tsv" || fail 'what does not end is not stopped'
[ -s "$dir/pids" ] || fail 'the trainer was not started'
require_gone

# A test that passes is reported at once, whatever else fails.
printf '#!/bin/sh\necho "All tests passed (3 assertions in 1 test case)"\n' >"$dir/build/test_cuda_on_gpu"
NO_BUILD=1 OUT=$dir/out "$dir/dev/gpu/check.sh" test >"$dir/table" || fail 'a part that passes has not status 0'
[ "$(grep -c $'^test\tok\t.*All tests passed' "$dir/out/checks.tsv")" -eq 2 ] || fail 'what passes is not in the table'
! "$dir/dev/gpu/check.sh" unknown >"$dir/table" 2>&1 || fail 'an unknown part is taken'
grep -q "unknown part 'unknown'; use build memory" "$dir/table" || fail 'an unknown part is not refused by name'

# What is missing is named.
program() { cat >"$dir/$1" && chmod +x "$dir/$1"; }   # from standard input
program broken_bin/ldd <<<$'#!/bin/sh\nprintf "\\tlibmpi.so.40 => not found\\n"'
program broken_bin/make <<<$'#!/bin/sh\necho "a.cu(3): error: planted"; echo "make: *** [a] Error 1"; exit 2'
! NO_BUILD=1 OUT=$dir/out PATH=$dir/broken_bin:$PATH "$dir/dev/gpu/check.sh" test >"$dir/table" || fail 'a library is missing: status 0'
grep -q $'^test\tFAILED\t.*does not start without libmpi.so.40$' "$dir/out/checks.tsv" || fail 'a missing library is not named'
! OUT=$dir/out PATH=$dir/broken_bin:$PATH "$dir/dev/gpu/check.sh" build >"$dir/table" || fail 'nothing was built: status 0'
grep -q $'^build\tFAILED\t.*status 2: a.cu(3): error: planted$' "$dir/out/checks.tsv" || fail 'the error of a compiler is not named'
program train_gpt <<<$'#!/bin/sh\necho "train_gpt: --comm nccl: this train_gpt was built without NCCL" >&2; exit 1'
NO_BUILD=1 SMALL=1 OUT=$dir/out "$dir/dev/gpu/check.sh" nccl >"$dir/table" || fail 'without NCCL, something fails'
grep -q $'^nccl\tskipped\t.*built without NCCL$' "$dir/out/checks.tsv" || fail 'without NCCL, the part is not skipped'

# All ops first: there may be no time left for runs.
program bin/compute-sanitizer <<<$'#!/bin/sh\nexit 0'
NO_BUILD=1 OUT=$dir/out PATH=$dir/bin:$PATH "$dir/dev/gpu/check.sh" sanitize >"$dir/table" || fail 'a part that passes has not status 0'
[ "$(grep -v '^#' "$dir/out/checks.tsv" | cut -f 4 | sed -n 1,2p | tr '\n' ' ')" = 'memcheck: the ops initcheck: the ops ' ] ||
  fail 'the ops are not the first that are checked for bad accesses'

# A switch that fails does not cost the others, and is gone with the next call.
program train_gpt <<'PROGRAM'
#!/bin/sh
case "$*" in *head-chunks*) echo 'train_gpt: planted' >&2; exit 9 ;; esac
while [ "$1" != -o ]; do shift; done
mkdir "$2"
for i in 1 2 3 4 5 6 7; do echo '{"kind": "train", "tokens_per_s": 100}'; done >"$2/metrics.jsonl"
PROGRAM
! NO_BUILD=1 SMALL=1 OUT=$dir/out "$dir/dev/gpu/check.sh" switches >"$dir/table" || fail 'a switch fails: status 0'
[ "$(grep -c '| 100 | 100 | +0.0% |' "$dir/out/switches.md")" -eq 8 ] || fail 'a switch that fails costs others'
grep -qF -- '--head-chunks 1` | | | failed: status 9: train_gpt: planted |' "$dir/out/switches.md" || fail 'a failed switch is not named'
NO_BUILD=1 OUT=$dir/out "$dir/dev/gpu/check.sh" test >"$dir/table" || fail 'a part that passes has not status 0'
[ ! -e "$dir/out/switches.md" ] || fail 'a table of an earlier call is still there'

# Beside PyTorch: figures are written when time is up, when there is no time for a variant, and without a profile.
program train_gpt <<PROGRAM
#!/bin/sh
case "\$*" in --version) echo planted; exit ;; *--profile*) exit 3 ;; esac
while [ "\$1" != -o ]; do shift; done
for i in \$(seq 25); do echo '{"kind": "train", "ms": 5, "loss": 1, "memory_bytes": 1}'; done >"\$2/metrics.jsonl"
echo \$\$ >>'$dir/pids'
exec sleep 60
PROGRAM
program dev/bench/torch_train.py <<'PYTHON'
import json, os, time
time.sleep(int(os.environ.get("PEER_SECONDS", "0")))
print(json.dumps({"ms": [4, 4, 4], "losses": [1], "gib": 1, "parameters": 1, "flops_per_token": 1, "kernel_ms": None,
                  "torch": "planted", "cuda": "planted"}))
PYTHON
program bin/nvidia-smi <<'PROGRAM'
#!/bin/sh
case "$*" in *memory.total*) echo '[N/A]' ;; *'-i 1') echo second ;; *) echo first ;; esac
PROGRAM
: >"$dir/modules/torch.py"
export PATH=$dir/bin:$PATH PYTHONPATH=$dir/modules CUDA_VISIBLE_DEVICES=1,0
! PEER_SECONDS=60 NO_BUILD=1 SITTING_SECONDS=8 "$dir/dev/gpu/check.sh" --sitting 2 >"$dir/table" || fail 'PyTorch does not end: status 0'
grep -q 'failed: .*compiled master: stopped; .*ours 6,553,600 tokens/s' "$dir/build/gpu-out/sitting-2/e2e.md" || fail 'our figures are lost'
require_gone
compared() { python3 "$dir/dev/bench/compare.py" --device cuda --cases gpt2:124M --rounds 1 "$@" 2>"$dir/table"; }
compared --seconds 0 >"$dir/e2e.md" || fail "compare.py fails: $(<"$dir/table")"
grep -q '^20.*, second, driver second, planted, ' "$dir/e2e.md" || fail 'the GPU is not the one in use'
grep -q '^| gpt2:124M | bf16 | 32 x 1024 | .* (compiled master) .*, compiled autocast: no time left |' "$dir/e2e.md" ||
  fail 'what was not timed is not named, or the batch is that of a large GPU'
compared >"$dir/e2e.md" || fail "compare.py fails without a profile: $(<"$dir/table")"
grep -q '^| gpt2:124M |.*compiled autocast 8,192,000 |' "$dir/e2e.md" || fail 'a profile that fails costs the row'
grep -q '^without a profile: ' "$dir/e2e.md" || fail 'a profile that fails is not named'
compared --steps 1 --seconds 0 >"$dir/e2e.md" || fail "compare.py fails with a single step: $(<"$dir/table")"
grep -q '^| gpt2:124M |.* | ?, [0-9]*% |' "$dir/e2e.md" || fail 'the spread of a single step is known'
mkdir "$dir/model"
echo '{"n_positions": 64, "vocab_size": 300}' >"$dir/model/config.json"
compared --cases "$dir/model" >"$dir/e2e.md" || fail "compare.py fails with a model in a directory: $(<"$dir/table")"
grep -q "^| $dir/model | bf16 | 2 x 64 |" "$dir/e2e.md" || fail 'a model in a directory is not compared'
if compared --cases gpt2:124M gpt2:125M; then fail 'a case that is not there is compared'; fi
grep -q '^compare.py: error: --cases gpt2:125M: none of gpt2:124M, .* nor a directory' "$dir/table" ||
  fail "a case that is not there: $(<"$dir/table")"
# The others say in a line what is wrong, wherever they are started.
if python3 "$dir/dev/bench/distributed.py" --steps 2 2>"$dir/err"; then fail 'distributed.py has no step to time'; fi
grep -q 'error: --steps 2 --runs 5: expected 3 steps' "$dir/err" || fail "distributed.py --steps 2: $(<"$dir/err")"
printf '#!/bin/sh\necho planted >&2\nexit 1\n' >"$dir/train_gpt"
if python3 "$dir/dev/bench/plan_accuracy.py" 1 1 >"$dir/table" 2>"$dir/err"; then fail 'plan_accuracy.py has no error'; fi
[ "$(<"$dir/err") $(grep -c 'refused: planted' "$dir/table")" = 'plan_accuracy.py: error: no run was both planned and made 4' ] ||
  fail "plan_accuracy.py: $(<"$dir/err")"
mkdir "$dir/disk"
if (cd "$dir/disk" && ../dev/bench/checkpoint.py --small --no-torch --rounds 1 --dir .) 2>"$dir/err"; then
  fail 'checkpoint.py has no error'
fi
grep -q -- "--out-dir $dir/disk/[^ ]*/run .*ended with status 1:" "$dir/err" || fail "checkpoint.py --dir: $(<"$dir/err")"
# beside_mpi.sh reads and prints numbers with a point also in a German locale, where one can be made.
mkdir -p "$dir/dev/comm" "$dir/scripts/multi_node"
cp dev/comm/beside_mpi.sh "$dir/dev/comm/"
program scripts/multi_node/local_mpirun.sh <<'PROGRAM'
#!/bin/sh
echo all_gather 4096 0.8
PROGRAM
echo 'MPI_VERSION := planted' >"$dir/build/config.mk"
localedef -i de_DE -f UTF-8 "$dir/de_DE.UTF-8" >"$dir/err" 2>&1 || :
LOCPATH=$dir LC_ALL=de_DE.UTF-8 "$dir/dev/comm/beside_mpi.sh" 2 1 1 >"$dir/table" 2>"$dir/err" || fail "beside_mpi.sh: $(<"$dir/err")"
grep -Fxq '| all_gather | 4096 | 2.56 | 2.56 | 1.00 |' "$dir/table" || fail "beside_mpi.sh: $(<"$dir/table")"
echo 'gpu_check_test: ok'
