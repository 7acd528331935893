#!/usr/bin/env bash
# No data race in the trainer for CPUs, built with ThreadSanitizer: in the self-test's draws, whose ranks are threads,
# in runs with what has threads besides (host updates of offloaded state, parameter servers, PipeDream, checkpoints in
# the background, copies of local ones, traces), and in ranks that are processes with some threads each. A race is
# reported with both stacks.
#
#   test/scripts/long_thread_sanitizer_test.sh
#
# Environment: DRAWS, such as 0-99: draws of the self-test, half a minute each; JOBS; CXX, CPPFLAGS, CXXFLAGS, LDFLAGS
# as for make. Takes minutes to build and to run.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "long_thread_sanitizer_test: $1" >&2
  exit 1
}
make --no-print-directory build/tsan/cpu/train_gpt || fail "the trainer does not build with ThreadSanitizer"

# Memory that libmpi and the loader have written is not theirs to explain.
export TSAN_OPTIONS="log_path=$dir/race exitcode=66 ignore_noninstrumented_modules=1 second_deadlock_stack=1"
unset TRAIN_GPT_TOKEN TRAIN_GPT_TOKEN_FILE
data=test/golden/gpt2_tiny/train.bin
run=(build/tsan/cpu/train_gpt -i "$data" -j "$data" --model d1 --n-layer 2 --n-embd 16 --n-head 2 --vocab-size 211
  --seq-len 32 --batch-size 2 --device cpu --peak-tflops 1 --val-steps 1 --val-every 4 --max-steps 6
  --checkpoint-every 2)
# of NAME COMMAND...: it ends well, and no race was reported.
of() {
  local name=$1 status=0
  shift
  "$@" >"$dir/log" 2>&1 || status=$?
  if compgen -G "$dir/race.*" >/dev/null; then fail "a data race in $name: $*: $(cat "$dir"/race.*)"; fi
  [ $status -eq 0 ] || fail "$name ends with $status: $*: $(tail -n 30 "$dir/log")"
}
# layout OPTIONS...: a run as threads, and its continuation
layout() {
  local out=$dir/out-$((++layouts))
  of "the run" "${run[@]}" --out-dir "$out" "$@"
  of "its continuation" "${run[@]}" --out-dir "$out" "$@" --max-steps 8
}
layouts=0

of "the self-test" build/tsan/cpu/train_gpt --selftest --local-ranks 4 --device cpu --selftest-draws "${DRAWS:-0-9}"

layout --local-ranks 3 --zero-stage 1 --checkpoint-local "$dir/local-1" --checkpoint-local-every 1 --check-replicas 2
layout --local-ranks 4 --zero-stage 3 --dp-replicate 2 --verify-updates 1 --ema 0.9 --trace "$dir/trace.json"
layout --local-ranks 2 --zero-stage 2 --offload moments,master --dtype bf16 --offload-update host
layout --local-ranks 2 --zero-stage 3 --offload moments,gradients,weights --offload-dir "$dir" --recompute block
layout --pp 2 --pp-chunks 2 --schedule interleaved --n-layer 4 --total-batch-size 256 --optimizer muon --tp 2
layout --pp 2 --schedule pipedream --model llama2:7B --n-ffn 40
layout --local-ranks 3 --dp-sync parameter-server-chain --grad-clip 0
layout --cp 2 --ep 2 --local-ranks 4 --model d2-e4 --skip-loss-z 9

# Two processes of two ranks each, which meet over TCP, watch each other and copy each other's local checkpoints.
processes() {
  local rank status=0 pids=()
  for rank in 0 1; do
    "${run[@]}" --local-ranks 2 --rank $rank --world-size 2 --rendezvous "file:$dir/meet" --init-timeout 120 \
      --checkpoint-local "$dir/host-$rank" --checkpoint-local-every 1 "$@" >"$dir/process.$rank" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1; do wait "${pids[rank]}" || { status=$?; cat "$dir/process.$rank"; }; done
  return $status
}
for options in '--zero-stage 2' '--pp 2 --total-batch-size 256 --zero-stage 1' '--tp 2 --tp-overlap'; do
  # shellcheck disable=SC2086
  of "two processes" processes $options --out-dir "$dir/processes-${options//[^a-z0-9]/-}"
done
echo "long_thread_sanitizer_test: ok: no race"
