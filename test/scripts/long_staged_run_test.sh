#!/usr/bin/env bash
# A run of three stages, in several layouts, is what PyTorch computes: see check_staged_run.py. Needs a Python with torch
# and transformers.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
if ! python=$(scripts/find_python.sh torch transformers safetensors); then
  echo "long_staged_run_test: skipped: no Python here has torch, transformers and safetensors; set PYTHON=..."
  exit 77
fi
export PYTHONDONTWRITEBYTECODE=1
for layout in '' '--local-ranks 2' '--tp 2' '--cp 2' '--pp 2' '--local-ranks 2 --zero-stage 3'; do
  echo "layout: ${layout:-one rank}"
  "$python" test/scripts/python/check_staged_run.py --layout "$layout" || {
    echo "long_staged_run_test: the trainer differs from PyTorch" >&2
    exit 1
  }
done
echo "long_staged_run_test: ok"
