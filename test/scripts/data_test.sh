#!/usr/bin/env bash
# data/tokenize_text.py and scripts/plot.py: round trips, the same shards from any number of workers, bad input refused.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
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

[ "$(tail -n 1 "$dir/out")" = "next             ./train_gpt -i '$dir/one_train_*.bin' --vocab-size 257 ..." ] ||
  fail "it does not say which options read the shards"

tokenize "$dir/a.txt" --out "$dir/a[1]" --val-fraction 0 >"$dir/out" || fail "tokenizing to a name with brackets failed"
[[ $(tail -n 1 "$dir/out") = *"-i '$dir/a[[]1]_train_*.bin' "* ]] || fail "no pattern for $dir/a[1]: $(tail -n 1 "$dir/out")"

# The number of workers changes nothing; shards are split at their size.
for workers in 1 3; do
  tokenize "$dir/a.txt" "$dir/b.txt" --out "$dir/w$workers" --val-fraction 0.1 --shard-size 50000 --workers $workers ||
    fail "tokenizing with $workers workers failed"
done
for file in "$dir"/w1_*.bin; do cmp "$file" "${file/w1_/w3_}" || fail "workers change $file"; done
[ "$(compgen -G "$dir/w1_train_*.bin" | wc -l)" -gt 2 ] || fail "no shards were cut"
[ -e "$dir/w1_val_000000.bin" ] || fail "no validation shard"

# Validation data are drawn as whole documents, from all files, by their text: equal documents are in one split, and
# neither others nor the number of workers change the draw. From one long text, blocks are drawn, from all of it.
python3 - "$dir" <<'PY'
import json, sys
directory = sys.argv[1]
for name in "xyz":
    with open(f"{directory}/{name}.jsonl", "w") as file:
        for i in range(1000):
            print(json.dumps({"text": f"{name}{i} " + "word " * (i % 50)}), file=file)
            if i % 10 == 0:
                print(json.dumps({"text": f"copy {i}"}), file=file)
with open(f"{directory}/book.txt", "w") as file:
    file.writelines(f"line {i} of the only book\n" for i in range(120000))
PY
tokenize "$dir"/{x,y,z}.jsonl --out "$dir/d1" --val-fraction 0.1 --workers 1 || fail "drawing documents failed"
tokenize "$dir"/{z,y}.jsonl --out "$dir/d2" --val-fraction 0.1 --workers 2 || fail "drawing documents failed"
tokenize "$dir"/{x,y,z}.jsonl --out "$dir/d3" --val-fraction 0.1 --val-seed 1 || fail "--val-seed failed"
tokenize "$dir/book.txt" --out "$dir/k1" --val-fraction 0.1 --workers 2 || fail "drawing blocks failed"
tokenize "$dir/book.txt" --out "$dir/k2" --val-fraction 0 || fail "--val-fraction 0 failed"
if [ -e "$dir/k2_val_000000.bin" ]; then fail "--val-fraction 0 made a validation shard"; fi
python3 - "$dir" <<'PY' || fail "validation was not drawn as it should be"
import struct, sys
directory = sys.argv[1]
def documents(name, split):
    data = open(f"{directory}/{name}_{split}_000000.bin", "rb").read()
    tokens = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
    assert tokens[0] == 256
    parts = "".join(chr(token) for token in tokens).split(chr(256))
    return parts[1:]

train, val = documents("d1", "train"), documents("d1", "val")
written = [f"{name}{i} " + "word " * (i % 50) for name in "xyz" for i in range(1000)]
assert sorted(set(train + val)) == sorted(written + [f"copy {i}" for i in range(0, 1000, 10)])
assert len(train + val) == 3300 and not set(train) & set(val)
for name in "xyz":   # of 1000 documents 100, give or take four standard deviations
    assert 62 <= sum(document.startswith(name) for document in val) <= 138
assert train == [document for document in train + val if document in set(train)]   # in the order of the files
fewer = set(documents("d2", "val"))
assert fewer == {document for document in val if document[0] in "yzc"}
assert set(documents("d3", "val")) != set(val)

train, val = documents("k1", "train"), documents("k1", "val")
lines = [int(line.split()[1]) for document in train + val for line in document.splitlines()]
assert sorted(lines) == list(range(120000)), "a line was lost, doubled or cut"
drawn = [int(document.split()[1]) for document in val]
assert drawn == sorted(drawn) and len(val) > 10
size = sum(map(len, val)) / sum(map(len, train + val))
assert 0.03 < size < 0.17, size   # 32 of 320 blocks, give or take four standard deviations
for third in range(3):
    assert any(third * 40000 <= line < (third + 1) * 40000 for line in drawn), "validation misses a third of the book"

# A document of several pieces that is no longer than a block stays whole; in a longer one, each block is drawn anew.
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import types
from documents import Draw
from tokenize_text import Part, Splitter
splitter = Splitter(types.SimpleNamespace(tokenizer="bytes", eot=None, draw=Draw(0.5, 0, 10)))
parts = [Part(True, True, 5, b"a", b"A"), Part(False, False, 5, b"b", b"B"), Part(False, False, 5, b"c", b"C"),
         Part(True, False, 5, b"d", b"D"), Part(False, False, 9, b"e", b"E")]
end = struct.pack("<H", 256)
assert list(splitter.divide(parts)) == [("val", end + b"A"), ("val", b"b"), ("train", end + b"C"), ("train", end + b"D"),
                                        ("train", b"e")]

# Cutting a document into blocks copies it a few times, not once for each block.
import random
from documents import Piece, _cut_inside
class Counted(bytes):
    copied = 0
    def __getitem__(self, key):
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            return part
        Counted.copied += len(part)
        return Counted(part)
random.seed(1)
text = Counted("".join(random.choice(["a", "word", "\u00e4", " ", "\n"]) for _ in range(60000)).encode())
blocks, rest, line = [], bytes(text), 7
while rest:
    end = len(rest) if len(rest) <= 100 else _cut_inside(rest, 100)
    blocks.append(Piece("x", line, not blocks, rest[:end]))
    line, rest = line + rest.count(b"\n", 0, end), rest[end:]
assert list(Draw(0.5, 0, 100).blocks(Piece("x", 7, True, text))) == blocks
assert Counted.copied < 6 * len(text), Counted.copied / len(text)
PY
printf 'a short text\n' >"$dir/short.txt"
refused 'drew none of the 1 document(s), 13 bytes; give --split-on, which cuts it into documents, a --val-file, or' \
  "$dir/short.txt" --val-fraction 0.01
printf '{"text": "a short text"}\n' >"$dir/short.jsonl"
refused 'drew none of the 1 document(s), 12 bytes; give more documents, a --val-file, or' "$dir/short.jsonl"
printf '{"text": "another text"}\n' >>"$dir/short.jsonl"
refused 'give more text, another --val-seed, a --val-file' "$dir/short.jsonl" --val-fraction 0.01
refused 'val-seed: expected a whole number of at most 64 characters' "$dir/short.txt" --val-seed "$(printf '%065d' 0 | tr 0 1)"

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

# A file of both splits is refused by any of its names; one that is named twice is read twice, and a notice says so.
ln -s a.txt "$dir/also_a.txt"
refused 'also_a.txt: used for both' "$dir/a.txt" "$dir/b.txt" --val-file "$dir/also_a.txt"
tokenize "$dir/a.txt" "$dir/"*a.txt --out "$dir/twice" --val-fraction 0 --workers 1 || fail "a file named twice was refused"
grep -q 'notice: 2 files (2 .txt: .*/a.txt, .*/also_a.txt) named more than once' "$dir/err" || fail "no word of files named twice"
tokenize "$dir/"{a,b}.txt --out "$dir/twice" --val-fraction 0 --overwrite || fail "two files were refused"
[ ! -s "$dir/err" ] || fail "a notice without a reason"

# Files that are no text, or compressed: refused by name with what to do, or read as what they are.
cp "$BASH" "$dir/program.txt"
refused 'program.txt: found a binary file' "$dir/program.txt"
printf 'gr\374n und sch\366n\n' >"$dir/latin1.txt"
refused 'latin1.txt: found text of which .* are not UTF-8; .*iconv' "$dir/latin1.txt"
printf '\377\376H\0i\0' >"$dir/utf16.txt"
refused 'UTF-16' "$dir/utf16.txt"
printf '\50\265\57\375....' >"$dir/a.txt.zst"
refused 'a zstd file, expected text or JSONL; decompress it: zstd -d' "$dir/a.txt.zst"
python3 - "$dir" <<'PY'
import gzip, json, random, sys
directory = sys.argv[1]
rows = [{"text": f"document {i}, \"with\" {{}} [] \u00e4 " + "words " * (i % 400)} for i in range(3000)]
forms = {"rows.jsonl": "\n".join(map(json.dumps, rows)), "lines.json": "\n".join(map(json.dumps, rows)),
         "list.json": json.dumps(rows, indent=2, ensure_ascii=False), "empty.json": "[]", "object.json": '{\n "text": "one"}',
         "cut.json": json.dumps(rows)[:-9], "odd.json": '[{"text": "one"}, {"text": }]', "two.json": '[{"text": "one"}]\n[]',
         "other.json": '[{"text": "one"}, {"body": "two"}]'}
for name, text in forms.items():
    open(f"{directory}/{name}", "w", encoding="utf-8").write(text)
    gzip.open(f"{directory}/{name}.gz", "wt", encoding="utf-8").write(text)
data = open(f"{directory}/rows.jsonl.gz", "rb").read()
open(f"{directory}/cut.jsonl.gz", "wb").write(data[:-20])
open(f"{directory}/bent.jsonl.gz", "wb").write(data[:2000] + bytes([data[2000] ^ 255]) + data[2001:])
PY
tokenize "$dir/rows.jsonl" --out "$dir/rows" || fail "JSONL failed"
for form in lines.json list.json rows.jsonl.gz list.json.gz; do
  tokenize "$dir/$form" --workers 1 --out "$dir/form" --overwrite || fail "$form failed"
  for split in train val; do
    cmp "$dir/rows_${split}_000000.bin" "$dir/form_${split}_000000.bin" || fail "$form is not read as the same documents"
  done
done
tokenize <(cat "$dir/rows.jsonl.gz") --format jsonl --val-fraction 0 --workers 1 --out "$dir/pipe" || fail "a pipe of gzip data failed"
refused 'no text in' "$dir/empty.json"
refused 'object.json:1: not a JSON value.* one list of them' "$dir/object.json"
refused 'cut.json: ends within document 3000: the file is cut off' "$dir/cut.json"
refused 'odd.json: document 2: not a JSON value' "$dir/odd.json"
refused 'two.json: text after the list of 1 documents' "$dir/two.json"
refused "other.json: document 2: no field 'text', only 'body'" "$dir/other.json"
refused 'cut.jsonl.gz: damaged gzip data' "$dir/cut.jsonl.gz"
refused 'bent.jsonl.gz: damaged gzip data' "$dir/bent.jsonl.gz"

# A folder: what is not read is counted and named.
mkdir -p "$dir/folder/deep"
printf 'some,more\n' >"$dir/folder/rows.csv"
cp "$dir/a.txt" "$dir/list.json" "$dir/folder"
gzip -c "$dir/b.txt" >"$dir/folder/deep/b.txt.gz"
tokenize "$dir/folder" --val-fraction 0 --workers 1 --out "$dir/folder_of" || fail "a folder failed"
cmp "$dir/one_train_000000.bin" "$dir/folder_of_train_000000.bin" || fail "a folder was read otherwise than its files"
grep -q 'folder: 2 files (1 .*: .*/list.json, .*/rows.csv) skipped' "$dir/err" || fail "no word of the files that were skipped"
rm "$dir/folder/a.txt" "$dir/folder/deep/b.txt.gz"
refused 'no .txt .*; there are 2 files (1 ' "$dir/folder"

# Folders are read through links, each once; one that cannot be read is named.
mkdir -p "$dir/linked/shut" "$dir/elsewhere"
cp "$dir/a.txt" "$dir/linked"
cp "$dir/b.txt" "$dir/elsewhere"
for link in other also_other; do ln -s ../elsewhere "$dir/linked/$link"; done
ln -s ../linked "$dir/elsewhere/circle"
tokenize "$dir/linked" --val-fraction 0 --workers 1 --out "$dir/linked_of" || fail "a folder with links failed"
cmp "$dir/one_train_000000.bin" "$dir/linked_of_train_000000.bin" || fail "a linked folder is not read once"
chmod 000 "$dir/linked/shut"
python3 - "$dir/linked" >"$dir/out" 2>"$dir/err" <<'PY' || fail "a folder that cannot be read is left out"
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import documents
os.chdir(sys.argv[1])   # so that it does not matter who may enter the folders above
if os.getuid() == 0:   # who may read everything
    os.seteuid(65534)
try:
    documents.find_files(["."])
except documents.DataError as error:
    assert "./shut: this folder cannot be read: Permission denied; " in str(error), error
else:
    sys.exit("no error")
assert documents.kind_of("X.ARROW", "auto") == "columns"
PY

# Suffixes in capital letters say the same.
cp "$dir/c.jsonl" "$dir/linked/C.JSONL"
gzip -c "$dir/c.jsonl" >"$dir/C.JSON.GZ"
for capitals in linked/C.JSONL C.JSON.GZ; do
  tokenize "$dir/$capitals" --out "$dir/capitals" --val-fraction 0 --overwrite || fail "$capitals failed"
  cmp "$dir/json_train_000000.bin" "$dir/capitals_train_000000.bin" || fail "$capitals is read otherwise than c.jsonl"
done

# Parquet and Arrow files, by their suffix or first bytes, are read as the same documents as JSONL; bad ones are refused.
printf 'PAR1....' >"$dir/cut.parquet"
refused 'Parquet, expected text or JSONL\|a Parquet file, expected text' "$dir/cut.parquet" --format text
if python=$(scripts/find_python.sh pyarrow); then
  tokenize() { "$python" data/tokenize_text.py "$@" 2>"$dir/err" >"$dir/out"; }
  "$python" - "$dir" <<'PY'
import json, sys
import pyarrow as pa, pyarrow.feather, pyarrow.parquet
directory = sys.argv[1]
texts = [json.loads(line)["text"] for line in open(f"{directory}/rows.jsonl")]
table = pa.table({"id": pa.array(range(3000)), "text": texts, "kind": pa.array(["a", "b", None] * 1000).dictionary_encode()})
pa.parquet.write_table(table, f"{directory}/rows.parquet", row_group_size=700)
pa.parquet.write_table(table, f"{directory}/large.bin", compression="zstd")   # no suffix of its own
pa.feather.write_feather(table, f"{directory}/rows.feather", chunksize=900)
with pa.OSFile(f"{directory}/rows.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
    stream.write_table(table, max_chunksize=500)
pa.parquet.write_table(pa.table({"body": [[1]], "text": [b"x"]}), f"{directory}/typed.parquet")
invalid = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
pa.feather.write_feather(pa.table({"text": invalid}), f"{directory}/latin.feather")
for name in ("rows.parquet", "rows.arrow", "rows.feather"):
    data = open(f"{directory}/{name}", "rb").read()
    kind = name.split(".")[1]
    open(f"{directory}/half.{kind}", "wb").write(data[:len(data) // 2])
data = bytearray(open(f"{directory}/rows.parquet", "rb").read())
data[len(data) // 2:len(data) // 2 + 3000] = bytes(3000)
open(f"{directory}/bent.parquet", "wb").write(data)
PY
  for form in rows.parquet large.bin rows.feather rows.arrow; do
    tokenize "$dir/$form" --workers 2 --out "$dir/form" --overwrite || fail "$form failed"
    for split in train val; do
      cmp "$dir/rows_${split}_000000.bin" "$dir/form_${split}_000000.bin" || fail "$form is not read as the same documents"
    done
  done
  tokenize "$dir/rows.parquet" --json-field kind --val-fraction 0 --out "$dir/kinds" || fail "a dictionary of texts failed"
  [ "$(stat -c %s "$dir/kinds_train_000000.bin")" = $((1024 + 2 * 4000)) ] || fail "rows without a text are not left out"
  refused "rows.parquet: no column 'words', only 'id', 'text', 'kind'; .*--json-field" "$dir/rows.parquet" --json-field words
  refused "rows.arrow: column 'id' holds int64, expected string" "$dir/rows.arrow" --json-field id
  refused "typed.parquet: column 'text' holds binary" "$dir/typed.parquet"
  refused "typed.parquet: column 'body' holds list" "$dir/typed.parquet" --json-field body
  refused "latin.feather: column 'text' has a text that is not UTF-8 in rows 1 to" "$dir/latin.feather"
  refused 'half.parquet: not readable as Parquet' "$dir/half.parquet"
  refused 'half.feather: not readable as Arrow' "$dir/half.feather"
  refused 'half.arrow: not readable as Arrow stream' "$dir/half.arrow"
  refused 'bent.parquet: not readable as Parquet' "$dir/bent.parquet"
  refused 'c.jsonl: not readable as Arrow stream' "$dir/c.jsonl" --format columns
  refused 'not read from a pipe' <(cat "$dir/rows.parquet") --format columns
  tokenize() { python3 data/tokenize_text.py "$@" 2>"$dir/err" >"$dir/out"; }
else
  echo "data_test: Parquet and Arrow skipped: no Python here has pyarrow"
fi
mkdir "$dir/without"
echo 'raise ImportError' >"$dir/without/pyarrow.py"
PYTHONPATH=$dir/without refused "need the Python package 'pyarrow'; install it with: .*pip install pyarrow" "$dir/cut.parquet"

# A full disk is named, and nothing is left.
status=0
(ulimit -f 20; tokenize "$dir/b.txt" --val-fraction 0 --workers 1 --out "$dir/refused") || status=$?
[ $status = 1 ] || fail "status $status where a file cannot be written"
grep -q 'refused_train_000000.bin: cannot be written: File too large.*--shard-size' "$dir/err" || fail "not named: a file that cannot be written"
[ -z "$(find "$dir" -name '*refused*')" ] || fail "a file that could not be written was left"
mkdir "$dir/disk"
if mount -t tmpfs -o size=64k tmpfs "$dir/disk" 2>/dev/null; then
  trap 'umount "$dir/disk"; rm -rf "$dir"' EXIT
  status=0
  tokenize "$dir/b.txt" --val-fraction 0 --out "$dir/disk/x/b" || status=$?
  [ $status = 1 ] || fail "status $status on a full disk"
  grep -q 'b_train_000000.bin: cannot be written: No space left on device.*free some space' "$dir/err" || fail "not named: a full disk"
  [ -z "$(ls -A "$dir/disk")" ] || fail "a full disk: something was left"
fi
status=0
tokenize "$dir/a.txt" --val-fraction 0 --out /proc/nowhere/a || status=$?
{ [ $status = 1 ] && grep -q "error: /proc/nowhere: No such file" "$dir/err"; } || fail "--out in a folder that cannot be made"

# A run that ends early, or meets another one.
python3 - "$dir" >"$dir/out" 2>"$dir/err" <<'PY' || fail "signals, kill -9 or two runs at once"
import glob, os, select, signal, subprocess, sys, time
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
directory = sys.argv[1]
options = ["--val-fraction", "0", "--workers", "1"]
command = ["python3", "data/tokenize_text.py", *options]

def shards(prefix):
    return {path.removeprefix(prefix): open(path, "rb").read() for path in glob.glob(f"{prefix}_*.bin")}

def temporaries(prefix):
    return glob.glob(f"{directory}/.{prefix}_train*tmp-*")

# A signal after the second of five new shards has its name: the others follow, and old ones go. kill -9: all are whole.
open(f"{directory}/driver.py", "w").write("""
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import programs, tokenize_text
replace, number, renamed = os.replace, int(sys.argv.pop(1)), []
def interrupted(*names):
    replace(*names)
    renamed.append(names)
    if len(renamed) == 2:
        os.kill(os.getpid(), number)
os.replace = interrupted
programs.run_program("tokenize_text.py", tokenize_text.main)
""")
open(f"{directory}/shorter.txt", "wb").write(open(f"{directory}/b.txt", "rb").read()[-90000:])
split = ["--shard-size", "20000", "--overwrite"]
subprocess.run([*command, *split, f"{directory}/shorter.txt", "--out", f"{directory}/expected"], check=True)
expected = shards(f"{directory}/expected")
assert len(expected) == 5
out = f"{directory}/sent"
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
    subprocess.run([*command, *split, f"{directory}/b.txt", "--out", out], check=True)
    before = shards(out)
    assert len(before) > 8 and not temporaries("sent")
    status = subprocess.run(["python3", f"{directory}/driver.py", str(int(number)), *options, *split, f"{directory}/shorter.txt",
                             "--out", out]).returncode
    if number != signal.SIGKILL:
        assert status == 128 + number and shards(out) == expected and not temporaries("sent"), (status, number)
names = sorted(before)[:2]
assert status == -9 and shards(out) == {**before, **{name: expected[name] for name in names}}
assert len(temporaries("sent")) == 3
subprocess.run([*command, f"{directory}/a.txt", "--overwrite", "--out", out], check=True)
assert not temporaries("sent") and len(shards(out)) == 1, "what kill -9 left is still there"

# SIGHUP ends a run and its temporary files, unless nohup has it ignored. Meanwhile a second run is refused.
os.mkfifo(f"{directory}/pipe.txt")
open(f"{directory}/.hup_train.tmp-000099", "w").close()   # of a run that was killed
for action in (signal.SIG_DFL, signal.SIG_IGN):
    run = subprocess.Popen([*command, f"{directory}/pipe.txt", "--out", f"{directory}/hup"],
                           preexec_fn=lambda: signal.signal(signal.SIGHUP, action))
    with open(f"{directory}/pipe.txt", "wb", buffering=0) as pipe:
        pipe.write(b"a line of text\n" * 200000)
        while not os.path.exists(f"{directory}/.hup_train.tmp-000000"):
            assert run.poll() is None
            time.sleep(0.02)
        second = subprocess.run([*command, f"{directory}/a.txt", "--out", f"{directory}/hup"], capture_output=True, text=True)
        assert second.returncode == 1 and "another process is writing there" in second.stderr, second
        assert len(temporaries("hup")) == 1
        run.send_signal(signal.SIGHUP)
        if action == signal.SIG_DFL:
            assert run.wait(60) == 128 + signal.SIGHUP, run.returncode
            assert not temporaries("hup") and not glob.glob(f"{directory}/hup*"), glob.glob(f"{directory}/*hup*")
assert run.wait(60) == 0 and len(shards(f"{directory}/hup")) == 1, "nohup is not respected"

# The workers end when kill -9 ended their parent: then nobody holds its output.
driver = """
import sys, time, types
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
from documents import Chunk, Draw
from tokenize_text import encode_all
def chunks():
    for i in range(6):
        yield Chunk("x", 1, False, True, b"text")
    print("ready", flush=True)   # the fifth waited for a result
    time.sleep(600)
options = types.SimpleNamespace(tokenizer="bytes", eot=None, split_on=None, json_field="text", draw=Draw(0, 0, 100), workers=2)
for _ in encode_all(chunks(), options):
    pass
"""
run = subprocess.Popen(["python3", "-c", driver], stdout=subprocess.PIPE, start_new_session=True)
assert run.stdout.readline() == b"ready\n"
run.kill()
run.wait()
ended = select.select([run.stdout], [], [], 30)[0]
if not ended:
    os.killpg(run.pid, signal.SIGKILL)
assert ended, "workers outlived their parent"

# Nobody reads the summary: the shards are there, and this is no error.
reader, pipe = os.pipe()
os.close(reader)
unread = subprocess.run([*command, f"{directory}/a.txt", "--out", f"{directory}/unread"], stdout=pipe, stderr=subprocess.PIPE)
assert unread.returncode == 0 and not unread.stderr and len(shards(f"{directory}/unread")) == 1, unread

# A file that is replaced is on disk before it has its name; if it cannot be written, nothing is left.
import prepare, programs, write_tokenizer
from text_tokenizers import ByteTokenizer
os.mkdir(f"{directory}/replaced")
prepare.write_json(f"{directory}/replaced/a.json", 1)
try:
    prepare.write_json(f"{directory}/replaced/a.json", [2, object()])
except TypeError:
    pass
assert os.listdir(f"{directory}/replaced") == ["a.json"] and prepare.read_json(f"{directory}/replaced/a.json") == 1
done, fsync, replace = [], os.fsync, os.replace
os.fsync, os.replace = lambda fd: done.append("fsync") or fsync(fd), lambda *names: done.append("replace") or replace(*names)
table = write_tokenizer.vocabulary_table(ByteTokenizer())
write_tokenizer.write_tokenizer(table, f"{directory}/replaced/t.bin")
assert done == ["fsync", "replace"], done
for name, reason in ("nowhere/t.bin", "No such file or directory"), ("replaced", "Is a directory"):
    try:
        write_tokenizer.write_tokenizer(table, f"{directory}/{name}")
    except programs.DataError as error:
        assert str(error).startswith(f"{directory}/{name}: cannot be written: {reason}; "), error
    else:
        sys.exit("no error")
PY

# --native: signals go to ./train_gpt, whose exit status is this program's, and names that it would read otherwise are
# refused. This one only notes how it was called.
mkdir -p "$dir/tree/data"
cp data/*.py "$dir/tree/data"
cat >"$dir/tree/train_gpt" <<'SH'
#!/usr/bin/env bash
echo "$@" >>"$FAKE_LOG"
if [[ $* = *'--tokenize-split val'* ]]; then exit 0; fi
trap 'exit 75' TERM USR1
[ -z "${FAKE_WAITS:-}" ] || echo "$PPID" >"$FAKE_WAITS"
for ((i = 0; i < ${FAKE_WAITS:+600}0; ++i)); do sleep 0.1; done
exit 3
SH
chmod +x "$dir/tree/train_gpt"
printf '{}' >"$dir/tokenizer.json"
native() {
  FAKE_LOG=$dir/calls python3 "$dir/tree/data/tokenize_text.py" --native --tokenizer "$dir/tokenizer.json" --out "$dir/native" \
    "$@" 2>"$dir/err" >"$dir/out"
}
status=0
native "$dir/b.txt" --val-file "$dir/a.txt" --overwrite || status=$?
[ $status = 3 ] || fail "--native: status $status instead of ./train_gpt's"
grep -q 'status 3, .*--restart, give --overwrite); the shards of --val-file are complete' "$dir/err" ||
  fail "--native: nothing says what is left, or what to do"
grep -q -- "--tokenize=$dir/b.txt .*--tokenize-split train .*--restart" "$dir/calls" || fail "--native: not called as it should be"
for signal in TERM USR1; do
  rm -f "$dir/waits"
  FAKE_WAITS=$dir/waits native "$dir/b.txt" --val-fraction 0 &
  until [ -s "$dir/waits" ]; do
    kill -0 $! || fail "--native does not start"
    sleep 0.05
  done
  kill -s $signal "$(<"$dir/waits")"
  status=0
  wait $! || status=$?
  [ $status = 75 ] || fail "--native: SIG$signal ends with status $status"
done
: >"$dir/calls"
cp "$dir/a.txt" "$dir/a,b.txt"
if native "$dir/a,b.txt" --val-fraction 0; then fail "--native accepts a name with a comma"; fi
grep -qF "a,b.txt: ./train_gpt takes this name for a list; rename" "$dir/err" || fail "--native: a,b.txt is not named"
mkdir "$dir/many"
python3 - "$dir/many" <<'PY'
import sys
for i in range(1200):
    open(f"{sys.argv[1]}/{i:0120}.txt", "w").write("text")
PY
if native "$dir/many" --val-fraction 0; then fail "--native accepts too many names"; fi
grep -q -- '--native with 1,200 files for train: their names take .* join files' "$dir/err" || fail "--native: too many names: not said"
printf 'PAR1....' >"$dir/table.bin"
if native "$dir/table.bin" --val-fraction 0; then fail "--native accepts a Parquet file"; fi
grep -q 'table.bin: ./train_gpt reads no Parquet or Arrow files; leave out --native' "$dir/err" || fail "--native: Parquet: not said"
touch "$dir/native_val_000000.bin" "$dir/native_val.tokenized.json"
if native "$dir/b.txt" --val-fraction 0; then fail "--native leaves validation shards of other tokens"; fi
grep -q 'native_val_000000.bin exists already, .*--overwrite' "$dir/err" || fail "--native: validation shards: not said"
[ ! -s "$dir/calls" ] || fail "--native: called in spite of a refusal"
if native "$dir/b.txt" --val-fraction 0 --overwrite; then fail "--native: ./train_gpt failed"; fi
[ -e "$dir/native_val_000000.bin" ] || fail "--native: validation shards were removed, and nothing was written"
sed -i 's/exit 3/exit 0/' "$dir/tree/train_gpt"
native "$dir/b.txt" --val-fraction 0 --overwrite || fail "--native --overwrite failed"
[ -z "$(compgen -G "$dir/native_val*")" ] || fail "--native --overwrite leaves validation shards of other tokens"

# The plot of several runs has its own name; the plot itself, if matplotlib is available.
mkdir -p "$dir/runs/"{a,b,c,d}
PYTHONDONTWRITEBYTECODE=1 python3 - "$dir/runs" <<'PY' || fail "plot.py's default output"
import os, sys
sys.path.insert(0, "scripts")
from plot import default_output
runs = [f"{sys.argv[1]}/{name}" for name in "abcd"]
def name(count, more=""): return os.path.relpath(os.path.abspath(default_output([run + more for run in runs[:count]])), sys.argv[1])
assert name(1) == name(1, "/metrics.jsonl") == "a/plot.png"
assert name(2) == name(2, "/") == name(2, "/metrics.jsonl") == "plot-a-b.png"
assert name(4) == "plot-a-b-c-1-more.png", name(4)
PY
if python=$(scripts/find_python.sh matplotlib); then
  printf '%s\n' '{"kind":"train","step":1,"loss":5.5,"grad_norm":1,"lr":0.1,"ms":3,"tokens_per_s":10,"mfu":0.1}' \
    '{"kind":"val","step":1,"loss":5.4}' '{"kind":"train","step":2,"loss":null,"grad_norm":null,"lr":0.1,"ms":3,"tokens_per_s":10,"mfu":0.1}' \
    >"$dir/metrics.jsonl"
  # A sample with a line separator of Unicode; the last line ends within a character.
  printf '{"kind":"sample","text":"a\342\200\250b"}\n{"kind":"tr\342' >>"$dir/metrics.jsonl"
  "$python" scripts/plot.py "$dir" >"$dir/out" 2>"$dir/err" || fail "plot.py failed"
  [[ $(head -c 4 "$dir/plot.png") == *PNG ]] || fail "plot.py wrote no PNG"
  cp "$dir/metrics.jsonl" "$dir/runs/a" && cp "$dir/metrics.jsonl" "$dir/runs/b"
  "$python" scripts/plot.py "$dir"/runs/[ab] >"$dir/out" 2>"$dir/err" || fail "plot.py of two runs failed"
  [[ -s $dir/runs/plot-a-b.png && $(<"$dir/out") = *plot-a-b.png ]] || fail "plot.py of two runs wrote elsewhere: $(<"$dir/out")"
  # A name is text, neither a formula nor hidden; the only step of a run is seen below the legend.
  run="$dir/runs/_\$^\$"
  mkdir "$run"
  head -n 1 "$dir/metrics.jsonl" >"$run/metrics.jsonl"
  "$python" scripts/plot.py "$run" >"$dir/out" 2>"$dir/err" || fail "plot.py failed on a name with dollars"
  if grep -q 'legend' "$dir/err"; then fail "plot.py leaves a name with an underscore out"; fi
  "$python" - "$run/plot.png" <<'PY' || fail "plot.py does not show a run of one step"
import sys
from matplotlib.image import imread
picture = imread(sys.argv[1])
lower = picture[len(picture) // 2:, :, :3] * 255
assert (abs(lower - (0x1f, 0x77, 0xb4)) < 20).all(2).sum() > 20
PY
else
  echo "data_test: plot.py skipped: no Python here has matplotlib"
fi
if python3 scripts/plot.py "$dir/nowhere" 2>"$dir/err"; then fail "plot.py accepted a missing run"; fi
echo "data_test: ok"
