#!/usr/bin/env bash
# `make bench`: training steps compared with PyTorch's. Takes the arguments of dev/bench/compare.py.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
python=$(scripts/find_python.sh torch transformers || scripts/find_python.sh torch) || {
  echo "run.sh: no Python here has torch; install it with: python3 -m venv .venv && .venv/bin/pip install torch" \
    "--index-url https://download.pytorch.org/whl/cpu, then run PYTHON=.venv/bin/python make bench" >&2
  exit 1
}
exec "$python" dev/bench/compare.py "$@"
