#!/usr/bin/env bash
# Fields of config.json are computed as transformers does, or refused by name: see check_config_fields.py. Needs a Python
# with torch and transformers. SEED=N repeats a run; otherwise the seed is random.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
if ! python=$(scripts/find_python.sh torch transformers safetensors); then
  echo "long_config_fields_test: skipped: no Python here has torch, transformers and safetensors; set PYTHON=..."
  exit 77
fi
export PYTHONDONTWRITEBYTECODE=1
seed=${SEED:-$RANDOM}
"$python" test/scripts/python/check_config_fields.py --seed "$seed" || {
  echo "long_config_fields_test: SEED=$seed test/scripts/long_config_fields_test.sh repeats it" >&2
  exit 1
}
echo "long_config_fields_test: ok"
