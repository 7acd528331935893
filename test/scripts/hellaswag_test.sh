#!/usr/bin/env bash
# data/hellaswag.py: the lm-evaluation-harness's texts, split into context and endings at the right token,
# downloaded or from a file, all or nothing; scripts/lm_eval.sh reports what is missing.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$dir"' EXIT
fail() {
  echo "hellaswag_test: $1" >&2
  cat "$dir/err" "$dir/out" >&2
  exit 1
}
hellaswag() { "${python:-python3}" data/hellaswag.py "$@" >"$dir/out" 2>"$dir/err"; }
touch "$dir/err" "$dir/out"

# Questions from ActivityNet and WikiHow that need all of the clean-up; a context that ends in a space; a string label,
# as in Hugging Face's copy.
mkdir "$dir/www"
cat >"$dir/www/hellaswag_val.jsonl" <<'JSON'
{"ind": 1, "activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he", "ctx": "unused", "split": "val", "label": 3, "endings": ["is using wrap.", "is ripping  tiles off.", " holds a cube. ", "starts pulling up roofing."]}
{"ind": 2, "activity_label": "Health", "ctx_a": "[header] How to sleep [title] Pick a bed. [step] It should be big.", "ctx_b": "", "label": "0", "endings": ["[substeps] Ask Dr. B\u00e4r [or not].", "Sit.", "Stand [title] up.", "Run."]}
{"ind": 3, "activity_label": "Yard", "ctx_a": "The boy", "ctx_b": "THEN runs [header]", "label": 1, "endings": ["a", "b", "c", "d"]}
JSON
cat >"$dir/expected" <<'TEXT'
Roof shingle removal: A man is sitting on a roof. He| is using wrap.| is ripping tiles off.| holds a cube.| starts pulling up roofing.|3
Health: How to sleep. Pick a bed. It should be big.|  Ask Dr. Bär .| Sit.| Stand. up.| Run.|0
Yard: The boy Then runs|  a|  b|  c|  d|1
TEXT
cat >"$dir/show.py" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    assert list(row) == ["context", "choices", "lengths", "label"], row
    assert len(row["lengths"]) == len(row["choices"]) and min(row["lengths"]) > 0, row
    texts = [bytes(ids).decode() for ids in [row["context"], *row["choices"]]]
    print("|".join([*texts, str(row["label"])]))
PY
same() {
  python3 "$dir/show.py" "$1" | diff - "$dir/expected" >"$dir/out" || fail "$1: the texts differ from the harness's"
}

hellaswag --input "$dir/www/hellaswag_val.jsonl" --tokenizer bytes --out "$dir/new/bytes.jsonl" || fail "bytes failed"
grep -q '3 questions' "$dir/out" || fail "the questions were not counted"
same "$dir/new/bytes.jsonl"

# The download, once.
python3 -u -m http.server --bind 127.0.0.1 --directory "$dir/www" 0 >"$dir/port" 2>"$dir/requests" &
server=$!
until grep -q port "$dir/port"; do sleep 0.05; done
url=http://127.0.0.1:$(sed 's/.* port \([0-9]*\).*/\1/' "$dir/port")
for _ in 1 2; do
  hellaswag --base-url "$url" --tokenizer bytes --out "$dir/web/bytes.jsonl" || fail "the download failed"
  same "$dir/web/bytes.jsonl"
done
[ "$(grep -c GET "$dir/requests")" = 1 ] || fail "an existing file was downloaded again"

# A tokenizer with merges: a space belongs to the word after it, also at the end of the context.
if python=$(scripts/find_python.sh tokenizers); then
  "$python" - "$dir" <<'PY'
import sys, tokenizers
tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = tokenizers.decoders.ByteLevel()
trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False,
                                         initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
tokenizer.train([sys.argv[1] + "/expected"], trainer)
tokenizer.save(sys.argv[1] + "/tokenizer.json")
PY
  hellaswag --input "$dir/www/hellaswag_val.jsonl" --tokenizer "$dir/tokenizer.json" --out "$dir/bpe.jsonl" ||
    fail "a tokenizer.json failed"
  "$python" - "$dir" <<'PY' >"$dir/out" 2>&1 || fail "a tokenizer.json is used wrongly"
import json, sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
rows = [json.loads(line) for line in open(sys.argv[1] + "/bpe.jsonl")]
for row, line in zip(rows, open(sys.argv[1] + "/expected"), strict=True):
    context, *choices, label = line.rstrip("\n").split("|")
    assert tokenizer.decode(row["context"]) == context, (context, row)
    for ids, choice in zip(row["choices"], choices, strict=True):
        assert tokenizer.decode(ids) == choice, (ids, choice)
        assert row["context"] + ids == tokenizer.encode(context + choice).ids, (context, choice)
PY
else
  echo "hellaswag_test: tokenizer.json skipped: no Python here has tokenizers"
fi
unset python

# Refusals: one line each, existing files unchanged.
refused() { # WORD ARGUMENTS...
  local word=$1 status=0
  shift
  hellaswag "$@" || status=$?
  [ "$status" = 1 ] || fail "status $status instead of 1: $*"
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
  [ "$(wc -l <"$dir/err")" = 1 ] || fail "more than one line: $*"
  same "$dir/new/bytes.jsonl"
  [ "$(ls "$dir/new")" = bytes.jsonl ] || fail "left something behind: $*"
}
good=$(head -n 1 "$dir/www/hellaswag_val.jsonl")
bad() { # WORD LINE: a file with a good line and this one
  printf '%s\n%s\n' "$good" "$2" >"$dir/bad.jsonl"
  refused "$1" --input "$dir/bad.jsonl" --tokenizer bytes --out "$dir/new/bytes.jsonl"
}
bad 'bad.jsonl:2' '{"activity_label'
bad 'bad.jsonl:2' '[1]'
bad "'ctx_b'" '{"activity_label": "", "ctx_a": "", "endings": ["a", "b", "c", "d"], "label": 1}'
bad '3 endings' '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b", "c"], "label": 1}'
bad 'label 4' '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b", "c", "d"], "label": 4}'
bad 'bad.jsonl' $'\xff'
for ending in context ending; do
  question='{"activity_label": "context", "ctx_a": "", "ctx_b": "", "endings": ["ending", "b", "c", "d"], "label": 1}'
  bad 'bad.jsonl:2: UnicodeEncodeError' "${question/\"$ending\"/\"\\ud800\"}"
done
bad 'bad.jsonl:2: OverflowError' '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b", "c", "d"], "label": Infinity}'
: >"$dir/empty.jsonl"
refused 'is empty' --input "$dir/empty.jsonl" --tokenizer bytes --out "$dir/new/bytes.jsonl"
refused 'nowhere' --input "$dir/nowhere" --tokenizer bytes --out "$dir/new/bytes.jsonl"
refused 'another name' --input "$dir/new/bytes.jsonl" --tokenizer bytes --out "$dir/new/../new/bytes.jsonl"
refused 404 --base-url "$url/nowhere" --tokenizer bytes --out "$dir/none/bytes.jsonl"

# The recipe for the harness itself.
lm_eval() { LM_EVAL=${program:-echo} scripts/lm_eval.sh "$@" >"$dir/out" 2>"$dir/err"; }
misses() { # WORD ARGUMENTS...
  local word=$1
  shift
  if lm_eval "$@"; then fail "was accepted: $*"; fi
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
}
misses 'which checkpoint'
for script in lm_eval.sh sweep_lr.sh install_deps.sh multi_node/run_{tcp,mpirun,sbatch}.sh; do
  grep -q "scripts/$script" <<<"$("scripts/$script" --help)" || fail "scripts/$script --help has no example"
done
misses 'no such directory' "$dir/nowhere"
mkdir "$dir/step-000001"
misses config.json "$dir/step-000001"
touch "$dir/step-000001/config.json"
misses index.json "$dir/step-000001"
touch "$dir/step-000001/model.safetensors"
misses tokenizer.json "$dir/step-000001"
program=no_such_lm_eval TOKENIZER=gpt2 misses 'pip install' "$dir/step-000001"
TOKENIZER=gpt2 lm_eval "$dir/step-000001/" --limit 5 || fail "TOKENIZER was rejected"
grep -q -- "--model hf --model_args pretrained=$dir/step-000001,tokenizer=gpt2 .*--limit 5" "$dir/out" ||
  fail "wrong call"
touch "$dir/step-000001/tokenizer.json"
lm_eval "$dir/step-000001" || fail "a tokenizer was not found"
grep -q -- "pretrained=$dir/step-000001 --batch_size 8 --tasks hellaswag" "$dir/out" || fail "wrong call"
lm_eval "$dir/step-000001" --tasks piqa || fail "--tasks was rejected"
if grep -q hellaswag "$dir/out"; then fail "runs more than --tasks"; fi
mv "$dir/step-000001" "$dir/a,b"
misses commas "$dir/a,b"
echo "hellaswag_test: ok"
