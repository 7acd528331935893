#!/usr/bin/env bash
# dev/gpu/check.sh with programs that fail, are missing or do not end: no part stops another, every result is written,
# and a sitting keeps its time.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir/dev/gpu" "$dir/build" "$dir/llmc"
cp dev/gpu/check.sh dev/gpu/check_training.py dev/gpu/switches.py "$dir/dev/gpu/"
cp llmc/core/log.h "$dir/llmc/"   # text to train on
fail() {
  echo "gpu_check_test: $*" >&2
  cat "$dir/out/checks.tsv" >&2
  exit 1
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
tried 1 8 'exec sleep 60'
grep -q $'^memory\tFAILED\t.*stopped after' "$dir/out/checks.tsv" || fail 'what does not end is not stopped'

# A test that passes is reported at once, whatever else fails.
printf '#!/bin/sh\necho "All tests passed (3 assertions in 1 test case)"\n' >"$dir/build/test_cuda_on_gpu"
NO_BUILD=1 OUT=$dir/out "$dir/dev/gpu/check.sh" test >"$dir/table" || fail 'a part that passes has not status 0'
[ "$(grep -c $'^test\tok\t.*All tests passed' "$dir/out/checks.tsv")" -eq 2 ] || fail 'what passes is not in the table'
! "$dir/dev/gpu/check.sh" unknown >"$dir/table" 2>&1 || fail 'an unknown part is taken'
grep -q "unknown part 'unknown'; use build memory" "$dir/table" || fail 'an unknown part is not refused by name'
echo 'gpu_check_test: ok'
