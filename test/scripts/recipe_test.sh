#!/usr/bin/env bash
# Fifty random recipes take the samples that they say, seen by an independent count (check_recipes.py), which notices a
# trainer that repeats, skips, mixes or schedules wrongly; --print-stages draws recipes, and scripts/plot_stages.py plots.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
fail() {
  echo "recipe_test: $1" >&2
  exit 1
}
check() { python3 test/scripts/python/check_recipes.py "$@"; }

check || fail "a recipe takes other samples than it says"
# A trainer whose output is changed by a sed script.
# shellcheck disable=SC2016  # for the trainer's shell
printf '#!/bin/sh\n./train_gpt "$@" | sed "$CHANGE"\n' >"$dir/wrong"
chmod +x "$dir/wrong"
for change in '2s/"seq_len":/"seq_len":1/' '3s/"lr":[0-9]*/"lr":7/' '2s/\["web",[0-9]*,0/["web",0,0/g' \
  '1,9s/"samples":\[\[[^]]*\],/"samples":[/' '4,9s/"web"/"code"/g' '2s/"tokens_per_step":/"tokens_per_step":1/'; do
  export CHANGE=$change
  if check --trainer "$dir/wrong" >/dev/null 2>&1; then fail "a trainer with $change was not noticed"; fi
done

printf '%s\n' '[[stage]]' 'name = "$^$"' 'tokens = 1000' 'seq-len = 64' 'total-batch-size = 256' >"$dir/one.toml"   # no formula
./train_gpt --print-stages --stages "$dir/one.toml" >"$dir/stages.txt"
grep -q 'all    1,024 tokens in 4 steps' "$dir/stages.txt" || fail "no table of stages"
./train_gpt --print-stages --stages "$dir/one.toml" --json >"$dir/stages.json"
if ! python=$(scripts/find_python.sh matplotlib); then
  echo 'recipe_test: ok, but nothing was plotted: matplotlib is missing'
  exit 0
fi
"$python" scripts/plot_stages.py "$dir/stages.json" -o "$dir/stages.png" >"$dir/out" || fail "no plot"
[ "$(head -c 4 "$dir/stages.png" | tail -c 3)" = PNG ] || fail "the plot is no PNG"
echo '{}' >"$dir/wrong.json"
if "$python" scripts/plot_stages.py "$dir/wrong.json" 2>"$dir/err"; then fail "a file without stages was plotted"; fi
grep -q 'expected what ./train_gpt --print-stages --json prints' "$dir/err" || fail "$(cat "$dir/err")"
echo 'recipe_test: ok'
