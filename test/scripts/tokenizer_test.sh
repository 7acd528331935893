#!/usr/bin/env bash
# The tokens of random texts match Hugging Face's library, if a Python has it. The first argument, or else the date, is
# the seed: other texts every day.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-$(date +%Y%m%d)}
if ! python=$(scripts/find_python.sh tokenizers); then
  echo "tokenizer_test: skipped: no Python here has tokenizers"
  exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" test/golden/make_tokenizers.py --random "$seed" "$dir/cases.json"
if ! TOKENIZER_CASES=$dir/cases.json build/test/text '[tokenizer-cases]' >"$dir/out" ||
  ! grep -q '^All tests passed' "$dir/out"; then
  cat "$dir/out"
  echo "tokenizer_test: repeat with test/scripts/tokenizer_test.sh $seed" >&2
  exit 1
fi
echo "tokenizer_test: ok, seed $seed"
