#!/usr/bin/env bash
# Runs the built tests and counts test cases; the last line is "N passed, N failed". Exits 1 if anything failed.
#
#   scripts/run_tests.sh [--long]
#
# The tests are those of build/test_train_gpt and build/test_cuda_on_cpu and every executable test/*_test.sh and
# test/*_test.py, each of which counts as one. Only with --long run test cases tagged [long], scripts named test/long_*,
# and the CUDA kernels under ThreadSanitizer. TESTS, in the environment, picks test cases of the programs in Catch2's
# words; the scripts are then left out.
set -euo pipefail
cd "$(dirname "$0")/.."

long=no
[ "${1:-}" != --long ] || long=yes
timeout=${TEST_TIMEOUT:-45m}
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

# How many lines of the notes begin with a word.
count() { awk -v word="$1" '$1 == word { ++n } END { print n + 0 }' "$notes"; }

filter=()
if [ -n "${TESTS:-}" ]; then filter=("$TESTS"); elif [ $long = no ]; then filter=('~[long]~[.]'); fi
programs=(build/test_train_gpt build/test_cuda_on_cpu)
[ $long = no ] || programs+=(build/test_cuda_on_cpu_tsan)
died=0
for program in "${programs[@]}"; do
  status=0 failed_before=$(count failed) started_before=$(count started)
  OMP_WAIT_POLICY=passive TEST_NOTES=$notes with_timeout "$program" "${filter[@]}" || status=$?
  # A test case that started and never ended is the one that the program died in. It may also die between test cases or
  # at exit, and must not pass for that.
  if [[ $(tail -n 1 "$notes") == 'started - '* ]]; then
    echo "run_tests.sh: $program ended with status $status in '$(sed -n '$s/^started - //p' "$notes")';" \
      "the test cases after it did not run"
    sed -i '$s/^started/& died/' "$notes"
    died=$((died + 1))
  elif [ "$status" -ne 0 ] && [ "$(count failed)" -eq "$failed_before" ] &&
    [[ -z ${TESTS:-} || $(count started) -gt $started_before ]]; then   # Catch2 3 minds a filter that matches nothing
    echo "run_tests.sh: $program ended with status $status, and not in a test case"
    died=$((died + 1))
  fi
done
passed=$(count passed) skipped=$(count skipped) failed=$(($(count failed) + died))
if [ $((passed + failed)) -eq 0 ]; then   # nor may a filter that matches nothing
  echo "run_tests.sh: no test case ran"
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
