#!/usr/bin/env bash
# With --parametrization completep every family trains as PyTorch does with multipliers of activations, and transformers
# computes the same with the checkpoint: see check_parametrization.py. A sweep of rates runs, goes on and is drawn, and a
# coordinate check, too. The first part needs a Python with torch and transformers.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export PYTHONDONTWRITEBYTECODE=1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "long_parametrization_test: $1" >&2
  exit 1
}

data=test/golden/gpt2_tiny/train.bin
sweep() {
  WIDTHS='16 32' RATES='1e-3 1e-2' HEAD_SIZE=8 scripts/sweep_lr.sh "$dir/sweep" --model d1 --vocab-size 211 \
    --train-data $data --val-data $data --val-steps 2 --seq-len 32 --max-steps 5 --parametrization mup --base-width 16
}
# Without matplotlib, which is hidden, it only draws nothing.
mkdir "$dir/hidden"
echo 'import sys; sys.modules["matplotlib"] = None' >"$dir/hidden/sitecustomize.py"
PYTHONPATH=$dir/hidden sweep >"$dir/log" || fail "the sweep failed: $(cat "$dir/log")"
[ "$(wc -l <"$dir/sweep/sweep.csv")" = 5 ] || fail "sweep.csv is $(cat "$dir/sweep/sweep.csv")"
cp "$dir/sweep/sweep.csv" "$dir/before"
sweep >"$dir/log" || fail "the sweep, repeated, failed: $(cat "$dir/log")"
cmp "$dir/before" "$dir/sweep/sweep.csv" || fail "the sweep, repeated, has other losses"
# A run that fails takes nothing from the others, wherever the script is called.
if (cd scripts && WIDTHS=16 RATES='none 1e-3' HEAD_SIZE=8 bash sweep_lr.sh "$dir/part" --model d1 --vocab-size 211 \
  --train-data ../$data --val-data ../$data --val-steps 2 --seq-len 32 --max-steps 5 >"$dir/log" 2>&1); then
  fail "a sweep in which a run failed ended with status 0"
fi
grep -q '^16,1e-3,[0-9]' "$dir/part/sweep.csv" || fail "a run that failed took another's result: $(cat "$dir/log")"
[ "$(wc -l <"$dir/part/sweep.csv")" = 2 ] || fail "sweep.csv is $(cat "$dir/part/sweep.csv")"
if WIDTHS=16 RATES=1 scripts/sweep_lr.sh "$dir/bad" --model d1 --no-such-option 2>"$dir/log"; then fail "a bad option"; fi
grep -q "ended with status 1: see $dir/bad/width-16/lr-1/log" "$dir/log" || fail "a bad option: $(cat "$dir/log")"

# The coordinate check as numbers, and drawn.
./train_gpt --coord-check 128,256,512 --model d1 --parametrization mup --base-width 32 --lr 2e-3 --json >"$dir/check.json" ||
  fail "the coordinate check failed: $(cat "$dir/check.json")"
if python=$(scripts/find_python.sh matplotlib); then
  "$python" scripts/plot_coord_check.py "$dir/check.json" >"$dir/log" || fail "the coordinate check was not drawn"
  [[ $(head -c 4 "$dir/check.png") == *PNG ]] || fail "plot_coord_check.py wrote no PNG"
  echo '{"passed": true}' >"$dir/bad.json"
  if "$python" scripts/plot_coord_check.py "$dir/bad.json" 2>"$dir/log"; then fail "not a coordinate check, drawn"; fi
  grep -q "bad.json: .*expected what --coord-check prints with --json" "$dir/log" || fail "no reason: $(cat "$dir/log")"
fi

if ! python=$(scripts/find_python.sh torch transformers safetensors); then
  echo "long_parametrization_test: skipped: no Python here has torch, transformers and safetensors; set PYTHON=..."
  exit 77
fi
"$python" test/scripts/python/check_parametrization.py test/golden/gpt2_tiny test/golden/families/* test/golden/experts/* ||
  fail "the trainer differs from PyTorch"
echo "long_parametrization_test: ok"
