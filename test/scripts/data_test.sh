#!/usr/bin/env bash
# data/tokenize_text.py and scripts/plot.py: round trips, the same shards from any number of workers, bad input refused.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
tokenize() { python3 data/tokenize_text.py "$@" 2>"$dir/err" >"$dir/out"; }
fail() {
  echo "data_test: $1" >&2
  cat "$dir/err" >&2
  exit 1
}

# refused WORD ARGUMENTS...: exit status 1, a message containing WORD, and no shard left behind.
refused() {
  local word=$1 status=0
  shift
  tokenize "$@" --out "$dir/refused" || status=$?
  [ "$status" = 1 ] || fail "status $status instead of 1: $*"
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
  if compgen -G "$dir/refused*" >/dev/null; then fail "left something behind: $*"; fi
}

# Bytes: the text round-trips, after the end-of-text token of each document.
printf 'Hello, w\xc3\xb6rld.\n' >"$dir/a.txt"
for i in $(seq 4000); do echo "line $i of a text that is long enough for several workers"; done >"$dir/b.txt"
tokenize "$dir/a.txt" "$dir/b.txt" --out "$dir/one" --val-fraction 0 --workers 1 || fail "tokenizing failed"
python3 - "$dir" <<'PY' || fail "the shard does not hold the text"
import struct, sys
directory = sys.argv[1]
data = open(f"{directory}/one_train_000000.bin", "rb").read()
header = struct.unpack("<256i", data[:1024])
tokens = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
expected = []
for name in "ab":
    expected += [256, *open(f"{directory}/{name}.txt", "rb").read()]
assert header[:3] == (20240520, 1, len(expected)), header[:3]
assert list(tokens) == expected
PY

# The number of workers changes nothing; shards are split at their size; the last part is for validation.
for workers in 1 3; do
  tokenize "$dir/a.txt" "$dir/b.txt" --out "$dir/w$workers" --val-fraction 0.1 --shard-size 50000 --workers $workers ||
    fail "tokenizing with $workers workers failed"
done
for file in "$dir"/w1_*.bin; do cmp "$file" "${file/w1_/w3_}" || fail "workers change $file"; done
[ "$(compgen -G "$dir/w1_train_*.bin" | wc -l)" -gt 2 ] || fail "no shards were cut"
[ -e "$dir/w1_val_000000.bin" ] || fail "no validation shard"

# JSONL.
printf '{"text": "one"}\n{"text": "two"}\n' >"$dir/c.jsonl"
tokenize "$dir/c.jsonl" --out "$dir/json" --val-fraction 0 || fail "JSONL failed"
[ "$(stat -c %s "$dir/json_train_000000.bin")" = $((1024 + 2 * 8)) ] || fail "JSONL gave the wrong number of tokens"

# Refusals.
refused nothing.txt "$dir/nothing.txt"
printf '{"text": "one"}\nnot json\n' >"$dir/bad.jsonl"
refused bad.jsonl "$dir/bad.jsonl"
refused body "$dir/c.jsonl" --json-field body
refused no_tokenizer.json "$dir/a.txt" --tokenizer "$dir/no_tokenizer.json"
before=$(cksum <"$dir/json_train_000000.bin")
if tokenize "$dir/a.txt" --out "$dir/json"; then fail "existing shards were overwritten"; fi
[ "$before" = "$(cksum <"$dir/json_train_000000.bin")" ] || fail "a refused run changed a shard"

# The plot, if matplotlib is available.
if python=$(scripts/find_python.sh matplotlib); then
  printf '%s\n' '{"kind":"train","step":1,"loss":5.5,"grad_norm":1,"lr":0.1,"ms":3,"tokens_per_s":10,"mfu":0.1}' \
    '{"kind":"val","step":1,"loss":5.4}' '{"kind":"train","step":2,"loss":null,"grad_norm":null,"lr":0.1,"ms":3,"tokens_per_s":10,"mfu":0.1}' \
    >"$dir/metrics.jsonl"
  printf '{"kind":"tr' >>"$dir/metrics.jsonl"
  "$python" scripts/plot.py "$dir" >"$dir/out" 2>"$dir/err" || fail "plot.py failed"
  head -c 4 "$dir/plot.png" | grep -q PNG || fail "plot.py wrote no PNG"
else
  echo "data_test: plot.py skipped: no Python here has matplotlib"
fi
if python3 scripts/plot.py "$dir/nowhere" 2>"$dir/err"; then fail "plot.py accepted a missing run"; fi
echo "data_test: ok"
