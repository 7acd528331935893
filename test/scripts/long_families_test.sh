#!/usr/bin/env bash
# Random models of every family train as with PyTorch's AdamW, and transformers loads the results: see
# check_families.py. With Muon, random layouts do: see check_muon_layouts.py. Fields of config.json are computed as
# transformers does, or refused by name: see check_config_fields.py. Needs a Python with torch and transformers. SEED=N
# repeats a run; otherwise the seed is random.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
if ! python=$(scripts/find_python.sh torch transformers safetensors); then
  echo "long_families_test: skipped: no Python here has torch, transformers and safetensors; set PYTHON=..."
  exit 77
fi
export PYTHONDONTWRITEBYTECODE=1
check() { "$python" test/scripts/python/check_families.py "$@"; }
fail() {
  echo "long_families_test: $1" >&2
  exit 1
}

for directory in test/golden/families/*/ test/golden/experts/*/; do
  check --model "${directory%/}" || fail "the trainer differs from PyTorch"
done
for seed in ${SEED:-1 2 $RANDOM}; do
  check --seed "$seed" || fail "the trainer differs from PyTorch; SEED=$seed test/scripts/long_families_test.sh repeats it"
done
# The comparison detects a different run.
for wrong in '--weight-decay 0' '--beta2 0.951' '--final-lr-frac 0.101' '--grad-clip 0'; do
  if check --seed 1 --family gpt2 --trainer-options "$wrong" >/dev/null 2>&1; then fail "$wrong was not noticed"; fi
done
layouts=(test/scripts/python/check_muon_layouts.py --count 40 --seed "${SEED:-$RANDOM}")
"$python" "${layouts[@]}" || fail "layouts with Muon differ from PyTorch: ${layouts[*]} repeats it"
fields=(test/scripts/python/check_config_fields.py --seed "${SEED:-$RANDOM}")
"$python" "${fields[@]}" || fail "fields of config.json differ from transformers: ${fields[*]} repeats it"
echo "long_families_test: ok"
