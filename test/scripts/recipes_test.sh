#!/usr/bin/env bash
# Every recipe in scripts/ is a run that the trainer accepts and that fits into one GPU with 80 GB; its comment prepares
# the data that it reads, and enough of them. run_kjv.sh plots its own run. A signal to the script reaches the trainer.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
# shellcheck disable=SC2046
trap 'kill_all KILL $(trainers_with --out-dir "$dir/d"); rm -rf "$dir"' EXIT
fail() {
  echo "recipes_test: $1" >&2
  exit 1
}

option() { sed -n "s/.* --$1 '\{0,1\}\([^ ']*\).*/\1/p" <<<"$2"; }   # NAME TEXT: its value in the text
declare -A billions_of   # prefix of shards -> size of the sample of FineWeb-Edu; prepare.py refuses another there
check_data() { # RECIPE
  local text command billions tokens prefix steps batch
  text=$(<"$1")
  command=$(grep '^#   data/prepare.py fineweb-edu' <<<"$text") || return 0
  billions=$(option config "$command") prefix=$(option out "$command")
  billions=${billions:-sample-10BT} billions=${billions//[^0-9]/} prefix=${prefix:-data/fineweb-edu/fineweb-edu}
  tokens=$(option tokens "$command") steps=$(option max-steps "$text") batch=$(option total-batch-size "$text")
  printf -v tokens %.0f "${tokens:-${billions}e9}"
  [ "$tokens" -le "${billions}000000000" ] || fail "$1: the sample of $billions billion tokens has no $tokens"
  [ $(((${steps:-1} - 1) * ${batch:-0})) -lt "$tokens" ] || fail "$1: $steps steps take more than $tokens tokens"
  [ "${billions_of[$prefix]:=$billions}" = "$billions" ] || fail "$1: $prefix is used for two samples"
  [ "$(option train-data "$text") $(option val-data "$text")" = "${prefix}_train_*.bin ${prefix}_val_*.bin" ] ||
    fail "$1 reads other data than its comment prepares"
}
count=0
for recipe in scripts/run_*.sh; do
  [ "$recipe" != scripts/run_tests.sh ] || continue
  plan=$("$recipe" --plan --memory-limit 74 --threads 2 2>&1) || fail "$recipe is refused: $plan"
  grep -q '^  activations' <<<"$plan" || fail "$recipe --plan shows no memory"
  check_data "$recipe"
  [ "$recipe" = scripts/run_kjv.sh ] || grep -q '^exec ./train_gpt ' "$recipe" ||
    fail "$recipe does not exec ./train_gpt, so a signal to the script would not end the trainer"
  count=$((count + 1))
done
[ "$count" -ge 5 ] || fail "only $count recipes were found"

# run_kjv.sh, with a Python that says what it would plot; --plan leaves no run, only one that was there before.
cat >"$dir/python" <<'PLOT'
#!/bin/sh
echo "plots $2"
PLOT
chmod +x "$dir/python"
export PYTHON=$dir/python OUT=$dir/a
run_kjv=(scripts/run_kjv.sh --train-data test/golden/gpt2_tiny/train.bin --val-data test/golden/gpt2_tiny/train.bin
  --sample-every 0 --max-steps 2 --warmup-steps 1)
kjv() { "${run_kjv[@]}" "$@" 2>&1 | sed -n 's/^plots //p'; }
[ "$(kjv)" = "$dir/a" ] || fail "run_kjv.sh does not plot its run"
[ "$(kjv --out-dir "$dir/a" -o "$dir/b")" = "$dir/b" ] || fail "run_kjv.sh does not plot a run in another directory"
[ "$(kjv -o "$dir/a" --out-dir="$dir/c")" = "$dir/c" ] || fail "run_kjv.sh does not plot a run with --out-dir=DIR"
[ "$(kjv --plan)" = '' ] || fail "run_kjv.sh --plan plots the run before it"
OUT=$dir/d "${run_kjv[@]}" --max-steps 1000000 >"$dir/log" 2>&1 &
until grep -qs '"kind":"train"' "$dir/d/metrics.jsonl"; do
  kill -0 $! || fail "run_kjv.sh ended: $(<"$dir/log")"
  sleep 0.02
done
kill -s TERM $!
status=0
wait $! || status=$?
[ $status = 75 ] || fail "run_kjv.sh ended with status $status after SIGTERM, expected 75: $(<"$dir/log")"
echo "recipes_test: ok, $count recipes"
