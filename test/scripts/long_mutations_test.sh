#!/usr/bin/env bash
# Damages run.json, trainer.json, metrics.jsonl, --config files and questions of --eval-choices at random, 4,000 times,
# and gives each to ./train_gpt: it is rejected by name, or no number changes. See mutate_files.py.
#
#   test/scripts/long_mutations_test.sh [COUNT]     SEED=N repeats a run; otherwise the seed is random
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export PYTHONDONTWRITEBYTECODE=1
seed=${SEED:-$RANDOM} count=${1:-4000}
python=$(scripts/find_python.sh)
"$python" test/scripts/python/mutate_files.py --seed "$seed" --count "$count" --jobs "$(nproc)" || {
  echo "long_mutations_test: SEED=$seed test/scripts/long_mutations_test.sh $count repeats it" >&2
  exit 1
}
echo "long_mutations_test: ok: $count mutations (SEED=$seed), none silently different"
