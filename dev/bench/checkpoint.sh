#!/usr/bin/env bash
# `make bench-checkpoint`: what saving costs, beside PyTorch's asynchronous saves where a Python here has torch. Takes
# the arguments of dev/bench/checkpoint.py.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
torch=()
python=$(scripts/find_python.sh torch) || {
  echo "checkpoint.sh: no Python here has torch: its saves are left out" >&2
  python=$(scripts/find_python.sh) torch=(--no-torch)
}
exec "$python" dev/bench/checkpoint.py "${torch[@]}" "$@"
