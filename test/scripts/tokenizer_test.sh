#!/usr/bin/env bash
# The tokens of random texts are those of Hugging Face's library, where a Python here has it. The first argument, or else
# the date, is the seed: another day tries other texts.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-$(date +%Y%m%d)}
if ! python=$(scripts/find_python.sh tokenizers); then
  echo "tokenizer_test: not tried: no Python here has tokenizers"
  exit 0
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" test/golden/make_tokenizers.py --random "$seed" "$dir/cases.json"
if ! TOKENIZER_CASES=$dir/cases.json build/test/text '[tokenizer-cases]' >"$dir/out"; then
  cat "$dir/out"
  echo "tokenizer_test: test/scripts/tokenizer_test.sh $seed does this again" >&2
  exit 1
fi
echo "tokenizer_test: ok, seed $seed"
