#!/usr/bin/env bash
# Runs the built tests and counts test cases; the last line is "N passed, N failed". Exits 1 if anything failed.
#
#   scripts/run_tests.sh [--long]
#
# The tests are those of build/test_train_gpt and every executable test/*_test.sh and test/*_test.py, each of which
# counts as one. Test cases tagged [long], and scripts named test/long_*, run only with --long. TESTS, in the
# environment, picks test cases of the binary in Catch2's words; the scripts are then left out.
set -euo pipefail
cd "$(dirname "$0")/.."

long=no
[ "${1:-}" != --long ] || long=yes
timeout=${TEST_TIMEOUT:-45m}
passed=0 failed=0
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT

# with_timeout COMMAND...: stops a command that hangs and whatever it has started. `timeout` gives it a process group
# of its own for that, which a Ctrl-C at the terminal does not reach: so wait for it here and pass the signal on.
with_timeout() {
  local status=0
  timeout --kill-after=10 "$timeout" "$@" </dev/null &
  trap 'kill $!; exit 130' INT TERM
  wait $! || status=$?
  trap - INT TERM
  [ $status -ne 124 ] || echo "run_tests.sh: stopped after $timeout (TEST_TIMEOUT): $*"
  return $status
}

status=0
if [ -n "${TESTS:-}" ]; then filter=$TESTS; elif [ $long = yes ]; then filter='*'; else filter='~[long]'; fi
OMP_WAIT_POLICY=passive TEST_NOTES=$notes with_timeout build/test_train_gpt "$filter" || status=$?

# A test case that started and never ended is the one that the program died in.
read -r passed failed skipped unended < <(awk '
  { count[$1]++ }
  END { print count["passed"] + 0, count["failed"] + 0, count["skipped"] + 0,
              count["started"] - count["passed"] - count["failed"] - count["skipped"] }' "$notes")
if [ "$unended" -ne 0 ]; then
  echo "run_tests.sh: the test program ended with status $status in '$(sed -n '$s/^started - //p' "$notes")';" \
    "the test cases after it did not run"
fi
failed=$((failed + unended))
# It may also die between test cases or at exit, and must not pass for that; nor may a filter that matches nothing.
if [ $((failed == 0 && (status != 0 || passed == 0))) -eq 1 ]; then
  echo "run_tests.sh: the test program ran $passed test cases and ended with status $status"
  failed=1
fi

if [ -z "${TESTS:-}" ]; then
  for script in test/*_test.sh test/*_test.py; do
    [[ -x $script && ($long = yes || $script != test/long_*) ]] || continue
    if with_timeout "$script"; then passed=$((passed + 1)); else
      echo "FAILED: $script"
      failed=$((failed + 1))
    fi
  done
fi

slow=$(awk '$1 != "started" && $2 >= 5 { seconds = $2; sub(/^[^ ]+ [^ ]+ /, ""); printf "%8.1f s  %s\n", seconds, $0 }' "$notes" |
  sort -k1,1nr | head -n 5)
[ -z "$slow" ] || printf 'the slowest test cases:\n%s\n' "$slow"
[ "$skipped" -eq 0 ] || echo "$skipped skipped"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
