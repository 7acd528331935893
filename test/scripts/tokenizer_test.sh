#!/usr/bin/env bash
# Tokenizers against Hugging Face's library, if a Python has it: the tokens of random texts are the same; a tokenizer of
# data/train_tokenizer.py gives the same tokens in data/tokenize_text.py and in the trainer; the tokenizer.json of a
# byte-level checkpoint gives the bytes. The first argument, or else the date, is the seed: other texts every day.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
seed=${1:-$(date +%Y%m%d)}
if ! python=$(scripts/find_python.sh tokenizers); then
  echo "tokenizer_test: skipped: no Python here has tokenizers"
  exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "tokenizer_test: $1" >&2
  cat "$dir/err" "$dir/out" >&2
  echo "tokenizer_test: repeat with test/scripts/tokenizer_test.sh $seed" >&2
  exit 1
}
ours() { # FILE: the trainer has the tokens of these cases
  TOKENIZER_CASES=$1 build/test/text '[tokenizer-cases]' >"$dir/out" && grep -q '^All tests passed' "$dir/out"
}
: >"$dir/err"
"$python" test/golden/make_tokenizers.py --random "$seed" "$dir/cases.json" || fail "no cases were made"
ours "$dir/cases.json" || fail "tokens differ from the library's"

# A tokenizer trained on a text: both tokenizers give its documents the same tokens, and a run can use it.
mkdir "$dir/texts"
cp Makefile "$dir/texts/a.txt"
cp train_gpt.cu "$dir/texts/b.txt"
printf 'na\xc3\xafve caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x99\x82 <|endoftext|> 12345  \n\n x' >"$dir/texts/c.txt"
train() { "$python" data/train_tokenizer.py "$@" >"$dir/out" 2>"$dir/err"; }
train "$dir/texts" --vocab-size 500 --out "$dir/new/tokenizer" || fail "no tokenizer was trained"
grep -q '^tokens  500, end of text 499$' "$dir/out" || fail "not 500 tokens"
"$python" data/tokenize_text.py "$dir/texts" --tokenizer "$dir/new/tokenizer" --out "$dir/t" --val-fraction 0 \
  >"$dir/out" 2>"$dir/err" || fail "not tokenized"
"$python" - "$dir" <<'PY' || fail "no cases were made of the shard"
import json, struct, sys
directory = sys.argv[1]
data = open(f"{directory}/t_train_000000.bin", "rb").read()
tokens = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
texts = [open(f"{directory}/texts/{name}.txt", newline="").read() for name in "ab"]   # c: holds a special token's name
ids, rest = [], list(tokens)
for text in texts:
    end = rest.index(499, 1)
    ids.append(rest[1:end])
    rest = rest[end:]
tokenizer = json.load(open(f"{directory}/new/tokenizer/tokenizer.json"))
assert len(tokenizer["model"]["vocab"]) == 499 and tokenizer["added_tokens"][0]["id"] == 499
with open(f"{directory}/trained.json", "w") as file:
    json.dump({"texts": texts, "tokenizers": [{"name": "trained", "file": "gpt2.json", "patch": tokenizer, "ids": ids,
                                               "decoded": [None, None], "templated": ids[0]}]}, file)
PY
ours "$dir/trained.json" || fail "the trainer's tokens differ from data/tokenize_text.py's"
./train_gpt -i "$dir/t_train_000000.bin" --model d1 --n-embd 16 --n-head 2 --vocab-size 500 -t 16 -x 1 --threads 1 \
  --tokenizer "$dir/new/tokenizer" --prompt 'the' -s 1 -g 4 -o "$dir/run" >"$dir/out" 2>"$dir/err" ||
  fail "a run does not take the trained tokenizer"
cmp "$dir/run/step-000001/tokenizer.json" "$dir/new/tokenizer/tokenizer.json" || fail "the checkpoint has another one"

# refused WORD ARGUMENTS...: exit status 1, a message with WORD, nothing written.
refused() {
  local word=$1 status=0
  shift
  train "$@" || status=$?
  [ "$status" = 1 ] || fail "status $status instead of 1: $*"
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
  [ ! -e "$dir/none" ] || fail "left something behind: $*"
}
refused 'overwrite replaces it' "$dir/texts" --out "$dir/new/tokenizer"
refused 'expected 257' "$dir/texts" --out "$dir/none" --vocab-size 256
refused 'expected 257 .* to 2097409' "$dir/texts" --out "$dir/none" --vocab-size 2097410
refused 'no such file' "$dir/nowhere" --out "$dir/none"
refused 'see --help' "$dir/texts" --out "$dir/none" --vocab 300
printf 'a\nb\xff%600s' '' >"$dir/bad.txt"
refused 'bad.txt:2: byte 0xff' "$dir/bad.txt" --out "$dir/none"
: >"$dir/empty.txt"
refused 'no text in' "$dir/empty.txt" --out "$dir/none"
train "$dir/texts/c.txt" --vocab-size 500 --out "$dir/few" || fail "a small text was refused"
grep -q 'notice: the text has no more pairs' "$dir/err" || fail "too few tokens, and no notice"

# Both take a special token as the end of text, rather than an ordinary one with a likelier name (Gemma's </s>).
"$python" - "$dir" >"$dir/out" 2>"$dir/err" <<'PY' || fail "no tokenizer was made"
import json, sys
made = json.load(open("test/golden/tokenizers/gpt2.json"))
made["model"]["vocab"]["</s>"] = made["model"]["vocab"].pop("<|endoftext|>")
made["added_tokens"] = [{**made["added_tokens"][0], "id": 657, "content": "<eos>"}]
json.dump(made, open(sys.argv[1] + "/special.json", "w"))
PY
printf 'a text' >"$dir/one.txt"
"$python" data/tokenize_text.py "$dir/one.txt" --tokenizer "$dir/special.json" --out "$dir/python" --val-fraction 0 \
  >"$dir/out" 2>"$dir/err" || fail "data/tokenize_text.py refuses <eos>"
./train_gpt --tokenize "$dir/one.txt" --tokenizer "$dir/special.json" --out "$dir/trainer" >"$dir/out" 2>"$dir/err" ||
  fail "the trainer refuses <eos>"
cmp "$dir/python_train_000000.bin" "$dir/trainer_train_000000.bin" || fail "another end of text"
[ "$(od -An -tu2 -j1024 -N2 "$dir/trainer_train_000000.bin" | tr -d ' ')" = 657 ] || fail "not <eos>"

# Tokenizers that put a space before a text: the parts of a long document have the tokens of the whole in both programs;
# only a block that follows one of the other split begins with a space, as documents do.
"$python" - "$dir" >"$dir/out" 2>"$dir/err" <<'PY' || fail "no tokenizers with a prefix were made"
import json, sys
directory = sys.argv[1]
made = {name: json.load(open(f"test/golden/tokenizers/{name}.json")) for name in ("llama2", "gpt2")}
json.dump(made["llama2"], open(f"{directory}/prepend.json", "w"))
made["gpt2"]["pre_tokenizer"]["add_prefix_space"] = True
json.dump(made["gpt2"], open(f"{directory}/byte-level.json", "w"))
metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
json.dump({**made["llama2"], "normalizer": None, "pre_tokenizer": metaspace}, open(f"{directory}/metaspace.json", "w"))
lines = [f"line {i} of a long text, na\u00efve caf\u00e9 \u65e5\u672c, cut\tinto parts\n" for i in range(26000)]
open(f"{directory}/long.txt", "w", encoding="utf-8").writelines(lines)
open(f"{directory}/drawn.txt", "w", encoding="utf-8").writelines(lines[:4000])
PY
for form in prepend byte-level metaspace; do
  "$python" data/tokenize_text.py "$dir/long.txt" --tokenizer "$dir/$form.json" --out "$dir/python" --val-fraction 0 \
    --workers 1 --overwrite >"$dir/out" 2>"$dir/err" || fail "$form: data/tokenize_text.py failed"
  ./train_gpt --tokenize "$dir/long.txt" --tokenizer "$dir/$form.json" --out "$dir/trainer" --restart >"$dir/out" \
    2>"$dir/err" || fail "$form: --tokenize failed"
  cmp "$dir/python_train_000000.bin" "$dir/trainer_train_000000.bin" || fail "$form: a long document has other tokens"
done
"$python" data/tokenize_text.py "$dir/drawn.txt" --tokenizer "$dir/prepend.json" --out "$dir/drawn" --val-fraction 0.1 \
  --workers 1 >"$dir/out" 2>"$dir/err" || fail "drawing blocks failed"
"$python" - "$dir" >"$dir/out" 2>"$dir/err" <<'PY' || fail "the blocks of a long document have other tokens"
import struct, sys, tokenizers
directory = sys.argv[1]
tokenizer = tokenizers.Tokenizer.from_file(f"{directory}/prepend.json")
end, found, runs = tokenizer.token_to_id("</s>"), [], 0
for split in ("train", "val"):
    data = open(f"{directory}/drawn_{split}_000000.bin", "rb").read()
    ids = list(struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:]))
    begins = [i for i, token in enumerate(ids) if token == end]
    assert begins[0] == 0
    for begin, after in zip(begins, begins[1:] + [len(ids)]):
        text = tokenizer.decode(ids[begin + 1:after])
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids[begin + 1:after], text[:80]
        found += text.splitlines(keepends=True)
        runs += 1
assert runs > 4, runs
assert sorted(found) == sorted(open(f"{directory}/drawn.txt", encoding="utf-8"))
PY

# A byte-level checkpoint: transformers, or else the library beneath it, reads its tokenizer as bytes.
"$python" data/tokenize_text.py "$dir/texts" --out "$dir/bytes" --val-fraction 0 >"$dir/out" 2>"$dir/err" || fail "bytes"
./train_gpt -i "$dir/bytes_train_000000.bin" --model d1 --n-embd 16 --n-head 2 --vocab-size 257 -t 16 -x 1 --threads 1 \
  -o "$dir/byte-run" >"$dir/out" 2>"$dir/err" || fail "a byte-level run failed"
"$python" - "$dir/byte-run/step-000001" "$seed" >"$dir/out" 2>"$dir/err" <<'PY' || fail "the byte tokenizer differs"
import importlib.util, random, sys
import tokenizers
directory, seed = sys.argv[1:]
random.seed(seed)
texts = ["", " ", "a", "\0\x7f\u00ad\u0100 naïve\r\n\t 日本語 🙂  x ."] + [
    "".join(chr(random.choice([random.randrange(128), random.randrange(0x800), random.randrange(0x10000, 0x110000)]))
            for _ in range(random.randrange(1, 200))) for _ in range(200)]
plain = tokenizers.Tokenizer.from_file(directory + "/tokenizer.json")
readers = [(lambda text: plain.encode(text).ids, lambda ids: plain.decode(ids))]
if importlib.util.find_spec("transformers"):
    from transformers import AutoTokenizer
    auto = AutoTokenizer.from_pretrained(directory)
    assert auto.eos_token_id == auto.bos_token_id == 256 and len(auto) == 257, (auto.eos_token_id, len(auto))
    readers.append((lambda text: auto.encode(text), lambda ids: auto.decode(ids)))
for encode, decode in readers:
    for text in texts:
        assert encode(text) == list(text.encode()), (text, encode(text))
        assert decode(list(text.encode())) == text, text
    assert encode("a<|endoftext|>b") == [97, 256, 98]
PY
LM_EVAL="echo" scripts/lm_eval.sh "$dir/byte-run/step-000001" >"$dir/out" 2>"$dir/err" ||
  fail "scripts/lm_eval.sh refuses a byte-level checkpoint"
echo "tokenizer_test: ok, seed $seed"
