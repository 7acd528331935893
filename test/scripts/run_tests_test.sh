#!/usr/bin/env bash
# scripts/run_tests.sh: nothing that fails, dies, hangs or never ran counts as passed.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mkdir -p build && mktemp -d "$PWD/build/run_tests_test.XXXXXX")   # programs do not run from every /tmp
trap 'rm -rf "$dir"' EXIT
export TEST_RESULTS=$dir/results TEST_TIMEOUT=60s
unset TESTS LONG
fail() { echo "run_tests_test: $*"; exit 1; }

# program NAME COMMANDS: a stand-in for a test program
program() { printf '#!/usr/bin/env bash\n%s\n' "$2" >"$dir/$1"; chmod +x "$dir/$1"; }
# ends_with LAST_LINE STATUS_OF_MAKE NAME...: runs the programs, then adds up
ends_with() {
  local wanted=$1 make_status=$2 name sum status=0
  shift 2
  for name in "$@"; do
    [ ! -x "$dir/$name" ] || scripts/run_tests.sh run "$name" "$dir/$name" >>"$dir/log"
  done
  sum=$(scripts/run_tests.sh sum "$make_status" "$@") || status=$?
  [ "$(tail -n 1 <<<"$sum")" = "$wanted" ] || fail "expected '$wanted' for $*, found: $sum"
  [[ $wanted = *' 0 failed' ]] || [ $status -eq 1 ] || fail "status $status of $*, expected 1"
}

# shellcheck disable=SC2016    # the stand-ins expand it
{
  program good 'printf "started - one\npassed 0.1 one\n" >>"$TEST_NOTES"'
  program bad 'printf "started - one\nfailed 0.1 one\n" >>"$TEST_NOTES"; exit 1'
  program dies 'printf "started - one\npassed 0.1 one\nstarted - two\n" >>"$TEST_NOTES"; kill -SEGV $$'
  program dies_later 'printf "started - one\npassed 0.1 one\n" >>"$TEST_NOTES"; kill -SEGV $$'
  program dies_first 'kill -SEGV $$'
  program hangs 'printf "started - one\n" >>"$TEST_NOTES"; sleep 60'
  program nothing 'exit 0'
  program slow 'seq 5000 | sed "s/.*/started - &\npassed 9 test case number &/" >>"$TEST_NOTES"'   # more than a pipe holds
  program test-trainer 'printf "started - %s\npassed 0.1 %s\n" "$1" "$1" >>"$TEST_NOTES"; [ ! -e "$0.$1" ] || kill -SEGV $$'
  program script.sh 'exit 0'
  program failing.sh 'exit 3'
  program skipped.sh 'echo "there is no GPU here"; exit 77'
}
ends_with '1 passed, 0 failed' 0 good
ends_with '2 passed, 0 failed' 0 good script.sh
ends_with '5000 passed, 0 failed' 0 slow
ends_with '1 passed, 1 failed' 2 good bad
ends_with '1 passed, 1 failed' 2 dies
ends_with '1 passed, 1 failed' 2 dies_later
ends_with '0 passed, 1 failed' 2 dies_first
TEST_TIMEOUT=2s ends_with '0 passed, 1 failed' 2 hangs
ends_with '0 passed, 1 failed' 0 nothing
ends_with '1 passed, 1 failed' 2 good failing.sh
ends_with '1 passed, 0 failed' 0 good skipped.sh
ends_with '1 passed, 1 failed' 2 good not_built
ends_with '1 passed, 1 failed' 2 good   # make failed elsewhere
ends_with '2 passed, 0 failed' 0 test-trainer   # in two parts
[ "$(sort "$TEST_RESULTS/test-trainer.notes" | sed -n 's/^started - //p' | tr '\n' ' ')" = \
  '[parallel]~[long]~[.] ~[parallel]~[long]~[.] ' ] || fail "the parts are $(<"$TEST_RESULTS/test-trainer.notes")"
: >"$dir/test-trainer.[parallel]~[long]~[.]"
ends_with '2 passed, 1 failed' 2 test-trainer
[[ $(scripts/run_tests.sh sum 0 good skipped.sh) = *'skipped.sh: there is no GPU here'* ]] || fail 'no reason for what was skipped'
export TESTS='no such test case'
ends_with '1 passed, 0 failed' 0 good nothing
ends_with '1 passed, 1 failed' 0 good dies_first
echo 'run_tests_test: ok'
