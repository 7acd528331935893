#!/usr/bin/env bash
# The benchmarks: train_gpt against PyTorch on this machine's CPU. `make bench` calls this; --help has the options.
#
#   dev/bench/run.sh [--cases d4,gpt2:124M] [--dtypes fp32,bf16] [--rounds N] [--steps N] [--out FILE] ...
#
# PYTHON names a Python that has torch; without it, python3 in PATH and the system's are tried.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

for argument in "$@"; do
  case $argument in
    -h | --help) exec "${PYTHON:-python3}" "$root/dev/bench/compare.py" --help ;;
  esac
done

if [ -n "${PYTHON:-}" ]; then
  "$PYTHON" -c 'import torch' 2>/dev/null || {
    echo "dev/bench: PYTHON=$PYTHON has no torch: name another Python, or install it: $PYTHON -m pip install torch" >&2
    exit 1
  }
  python=$PYTHON
elif ! python=$("$root/scripts/find_python.sh" torch); then
  cat >&2 <<'EOF'
dev/bench: no Python here has torch, which we compare with. Install it and say where it is:
  python3 -m venv .venv-bench
  .venv-bench/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
  PYTHON=.venv-bench/bin/python make bench
EOF
  exit 1
fi
exec "$python" "$root/dev/bench/compare.py" "$@"
