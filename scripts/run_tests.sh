#!/usr/bin/env bash
# Runs one test program or script and records how its test cases ended; adds up the records. `make test` calls it for
# each program as soon as it is built.
#
#   scripts/run_tests.sh run NAME COMMAND...    the result goes to build/results/NAME.notes, the output to NAME.log;
#                                               failures are printed at once
#   scripts/run_tests.sh sum STATUS NAME...     adds up; STATUS is make's. The last line is "N passed, N failed". Exits 1
#                                               if anything failed
#
# A test program writes a line to the file TEST_NOTES when a test case begins and one when it ends (test/main.cpp). A
# script (*.sh) counts as one test case; exit status 77 says that it was skipped, and the last line of its output why.
# From the environment: TESTS, test cases in Catch2's syntax; LONG, also those tagged [long]; TEST_TIMEOUT. Programs
# with ThreadSanitizer (tsan-*) run no [long] cases, which would take hours: these sweep layouts that the others sample.
# Nor do they test whether each wait is needed (mutation.h): leaving one out is a race.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
export LC_ALL=C   # awk reads and prints numbers with a point
results=${TEST_RESULTS:-build/results}
mkdir -p "$results"

# with_timeout COMMAND...: stops a command that hangs, and all that it started. `timeout` gives it a process group of
# its own for that, which a Ctrl-C at the terminal does not reach: so this waits and passes the signal on.
with_timeout() {
  local status=0 limit=${TEST_TIMEOUT:-45m}
  timeout --kill-after=10 "$limit" "$@" </dev/null &
  trap 'kill $!; exit 130' INT TERM
  wait $! || status=$?
  trap - INT TERM
  [ $status -ne 124 ] || echo "run_tests.sh: stopped after $limit (TEST_TIMEOUT): $*"
  return $status
}

# The first (or, with `last`, the last) processor of this process.
one_processor() {
  local list
  list=$(taskset -cp $$)   # ... affinity list: 0,1
  list=${list##* }
  if [ "$1" = first ]; then echo "${list%%[,-]*}"; else echo "${list##*[,-]}"; fi
}

# count WORD FILE...: the lines that begin with the word
count() {
  local word=$1
  shift
  awk -v word="$word" '$1 == word { ++n } END { print n + 0 }' "$@" </dev/null
}

# part NAME COMMAND...: runs a test program, and notes how it ended if its test cases do not say so
part() {
  local name=$1 status=0 notes=$results/$1.notes log=$results/$1.log
  shift
  : >"$notes"
  OMP_WAIT_POLICY=passive TEST_NOTES=$notes with_timeout "$@" >"$log" 2>&1 || status=$?
  # A test case that began and never ended is the one in which the program died. A program that dies between test
  # cases or at exit must not pass either.
  if [[ $(tail -n 1 "$notes") == 'started - '* ]]; then
    echo "run_tests.sh: $* ended with status $status in '$(sed -n '$s/^started - //p' "$notes")';" \
      "the test cases after it did not run" >>"$log"
    echo "failed 0 $(sed -n '$s/^started - //p' "$notes")" >>"$notes"
  elif [ "$(count started "$notes")" -eq 0 ] && [[ -n ${TESTS:-} && $status = [02] ]]; then
    :   # the filter matches nothing here, for which Catch2 2 ends with 0 and Catch2 3 with 2
  elif [ $status -ne 0 ] && [ "$(count failed "$notes")" -eq 0 ] || [ "$(count started "$notes")" -eq 0 ]; then
    echo "run_tests.sh: $* ended with status $status, and not in a test case" >>"$log"
    echo "failed 0 $name: status $status outside of its test cases" >>"$notes"
  fi
}

run() {
  local name=$1 status=0 start=$SECONDS usual='~[long]~[.]'
  if [[ $name = tsan-* ]]; then usual='~[long]~[.]~[waits]'; elif [ -n "${LONG:-}" ]; then usual=; fi
  shift
  local notes=$results/$name.notes log=$results/$name.log
  : >"$notes"
  if [[ $1 == *.sh ]]; then
    with_timeout "$@" >"$log" 2>&1 || status=$?
    local fate=failed
    case $status in 0) fate=passed ;; 77) fate=skipped ;; esac
    printf 'started - %s\n%s %s %s\n' "$name" $fate $((SECONDS - start)) "$name" >>"$notes"
  elif [[ $name = test-trainer && -z ${TESTS:-} ]]; then
    # It takes longest, so that it would run alone at the end: in two parts. Tests of many ranks each stay on a processor
    # where there are two: waking threads on the other one takes a quarter of their processor time and gains nothing.
    local here=() there=()
    if [ "$(nproc)" -eq 2 ] && command -v taskset >/dev/null; then
      here=(taskset -c "$(one_processor first)") there=(taskset -c "$(one_processor last)")
    fi
    part "$name-parallel" "${here[@]}" "$@" "[parallel]${usual:-~[.]}" &
    local first=$!
    part "$name-other" "${there[@]}" "$@" "~[parallel]${usual:-~[.]}" &
    trap 'kill $first $!; exit 130' INT TERM
    wait $first
    wait $!
    trap - INT TERM
    cat "$results/$name"-{parallel,other}.notes >"$notes"
    cat "$results/$name"-{parallel,other}.log >"$log"
  else
    local filter=${TESTS:-$usual}
    part "$name" "$@" ${filter:+"$filter"}
  fi
  local failed
  failed=$(count failed "$notes")
  echo "ran - $name" >>"$notes"   # to its end
  {
    flock 9   # one log at a time
    [ "$failed" -eq 0 ] || sed "s/^/$name: /" "$log"
    echo "$name: $(count passed "$notes") passed, $failed failed, $((SECONDS - start)) s"
  } 9>"$results/lock"
}

sum() {
  local status=$1 name passed failed skipped slow notes=()
  shift
  for name in "$@"; do
    notes+=("$results/$name.notes")
    if [ ! -e "$results/$name.notes" ]; then
      echo "failed 0 was not built, and so did not run" >"$results/$name.notes"
    elif [ "$(tail -n 1 "$results/$name.notes")" != "ran - $name" ]; then
      echo "failed 0 did not run to its end" >>"$results/$name.notes"
    fi
  done
  passed=$(count passed "${notes[@]}") failed=$(count failed "${notes[@]}") skipped=$(count skipped "${notes[@]}")
  if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then
    echo "run_tests.sh: make ended with status $status"
    failed=1
  elif [ $((passed + failed)) -eq 0 ]; then   # a filter may match nothing
    echo "run_tests.sh: no test case ran"
    failed=1
  fi
  slow=$(awk '$1 != "started" && $2 + 0 >= 5 { seconds = $2; sub(/^[^ ]+ [^ ]+ /, ""); printf "%8.1f s  %s\n", seconds, $0 }' \
    "${notes[@]}" | sort -k1,1nr | sed -n 1,8p)   # not head: sort would die of a closed pipe
  [ -z "$slow" ] || printf 'the slowest test cases:\n%s\n' "$slow"
  if [ "$failed" -gt 0 ]; then
    echo 'failed:'
    awk '$1 == "failed" { sub(/^[^ ]+ [^ ]+ /, ""); print "  " FILENAME ": " $0 }' "${notes[@]}" |
      sed "s,$results/\([^:]*\)\.notes: ,\1: ,"
  fi
  if [ "$skipped" -gt 0 ]; then
    echo "$skipped skipped:"
    for name in "$@"; do
      [ "$(count skipped "$results/$name.notes")" -eq 0 ] || echo "  $name: $(tail -n 1 "$results/$name.log" 2>/dev/null)"
    done
  fi
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
}

"$@"
