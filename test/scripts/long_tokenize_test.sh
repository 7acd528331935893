#!/usr/bin/env bash
# ./train_gpt --tokenize against Hugging Face's library on 200 MB of text in many scripts (data/gather_texts.py) and on
# 100,000 random byte strings, with tokenizers trained on it in the forms of GPT-2, Llama 3, Qwen, SmolLM and Llama 2:
# the same tokens. Prints both speeds. Takes the network, and an hour or more, of which the library takes almost all.
#
#   test/scripts/long_tokenize_test.sh [SEED [MB]]       default: the date; all of the texts
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
seed=${1:-$(date +%Y%m%d)}
if ! python=$(scripts/find_python.sh tokenizers); then
  echo "long_tokenize_test: skipped: no Python here has tokenizers"
  exit 77
fi
texts=${TEXTS:-build/texts}
[ -e "$texts/texts.jsonl" ] || python3 data/gather_texts.py --out "$texts" || {
  echo "long_tokenize_test: skipped: the texts cannot be gathered here"
  exit 77
}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$python" test/scripts/python/compare_tokenizers.py "$texts/texts.jsonl" "$dir" "$seed" ${2:+"$2"} || {
  echo "long_tokenize_test: repeat with test/scripts/long_tokenize_test.sh $seed ${2:-}" >&2
  exit 1
}
echo "long_tokenize_test: ok, seed $seed"
