#!/usr/bin/env bash
# data/prepare.py against a local server: interrupted downloads and killed runs resume, with the same shards;
# data/write_tokenizer.py. The parts that need tiktoken or pyarrow run if a Python has them.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'kill "$server" 2>/dev/null; rm -rf "$dir"' EXIT
fail() {
  echo "datasets_test: $1" >&2
  cat "$dir/err" "$dir/out" >&2
  exit 1
}

# The server: the paths below $dir/www, with ETags; /flaky/ is the same but disconnects after 30,000 bytes; lists of
# parquet files: of the configuration "all" as in $dir/listing.json, else two, on two pages.
mkdir -p "$dir/www/tinyshakespeare" "$dir/www/resolve/main"
cat >"$dir/server.py" <<'PY'
import http.server, json, os, sys, zlib

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.split("?")[0]
        flaky, path = path.startswith("/flaky"), path.removeprefix("/flaky")
        print(self.path, self.headers.get("Range", ""), self.headers.get("If-Range", ""), file=sys.stderr, flush=True)
        if path.startswith("/api/"):
            page = "page=2" in self.path
            body = json.dumps([{"path": f"sample/10BT/00{int(page)}_00000.parquet"}]).encode()
            if path.endswith("/data"):
                body = open(sys.argv[2], "rb").read()
            self.send_response(200)
            if not page and not path.endswith("/data"):
                self.send_header("Link", f'<http://{self.headers["Host"]}{path}?page=2>; rel="next"')
        else:
            file = sys.argv[1] + path.removeprefix("/datasets/HuggingFaceFW/fineweb-edu/resolve/main")
            if not os.path.exists(file):
                return self.send_error(404)
            body = open(file, "rb").read()
            version = f'"{zlib.crc32(body)}"'
            same = self.headers.get("If-Range", version) == version
            start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if same else 0
            if start >= len(body) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                return self.end_headers()
            self.send_response(206 if start else 200)
            self.send_header("ETag", version)
            body = body[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:30000] if flaky else body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
PY
python3 "$dir/server.py" "$dir/www" "$dir/listing.json" >"$dir/port" 2>"$dir/requests" &
server=$!
for i in $(seq 3000); do printf 'First Citizen %d:\nBefore we proceed any further, hear me speak.\n\n' "$i"; done \
  >"$dir/www/tinyshakespeare/input.txt"
for i in $(seq 20000); do printf 'Once upon a time, there was story number %d.\n<|endoftext|>\n' "$i"; done \
  >"$dir/www/resolve/main/TinyStoriesV2-GPT4-train.txt"
printf 'A small story.\n<|endoftext|>\nAnother one.\n<|endoftext|>\n' >"$dir/www/resolve/main/TinyStoriesV2-GPT4-valid.txt"
until [ -s "$dir/port" ]; do sleep 0.05; done
url=http://127.0.0.1:$(cat "$dir/port")

prepare() { python3 data/prepare.py "$@" >"$dir/out" 2>"$dir/err"; }
same_shards() { # PREFIX PREFIX
  local file
  for file in "$1"_*.bin; do cmp -s "$file" "$2${file#"$1"}" || fail "$file and $2${file#"$1"} differ"; done
  [ "$(compgen -G "$1_*.bin" | wc -l)" = "$(compgen -G "$2_*.bin" | wc -l)" ] || fail "$1 and $2: different numbers of shards"
}

# Tiny Shakespeare: a tenth of the speeches are for validation, from all of the text, and none is lost.
prepare shakespeare --tokenizer bytes --base-url "$url" --out "$dir/s/s" || fail "shakespeare failed"
python3 - "$dir" <<'PY' || fail "the shards do not hold the text"
import struct, sys
directory = sys.argv[1]
def tokens(path):
    data = open(path, "rb").read()
    header = struct.unpack("<3i", data[:12])
    assert header[:2] == (20240520, 1) and header[2] == (len(data) - 1024) // 2
    return list(struct.unpack(f"<{header[2]}H", data[1024:]))
val, train = (tokens(f"{directory}/s/s_{split}_000000.bin") for split in ("val", "train"))
text = open(f"{directory}/www/tinyshakespeare/input.txt", "rb").read()
def documents(tokens):
    return "".join(map(chr, tokens)).split(chr(256))[1:]
speeches = [speech.decode() for speech in text.split(b"\n\n") if speech]
drawn = set(documents(val))
assert [speech for speech in speeches if speech not in drawn] == documents(train)
assert [speech for speech in speeches if speech in drawn] == documents(val)
assert 230 <= len(drawn) <= 370   # of 3000, give or take four standard deviations
assert any("Citizen 1" in s for s in drawn) and any("Citizen 29" in s for s in drawn)
assert open(f"{directory}/s/gpt2_tokenizer.bin", "rb").read(16) == struct.pack("<4I", 20240328, 2, 257, 256)
PY

# A connection that breaks repeatedly: the download resumes each time.
prepare shakespeare --tokenizer bytes --base-url "$url/flaky" --out "$dir/f/s" || fail "a flaky connection failed"
grep -q 'flaky.*bytes=60000- "[0-9]*"$' "$dir/requests" || fail "the download did not resume this version where it broke off"
same_shards "$dir/s/s" "$dir/f/s"
[ "$(cd "$dir/f" && echo *)" = "gpt2_tokenizer.bin input.txt s.done-0000.json s.prepare.json s_train_000000.bin s_val_000000.bin" ] ||
  fail "something else was left: $(ls "$dir/f")"

# All bytes came, but the program ended before the file had its name; or more bytes than the server has.
for more in '' 'more'; do
  rm -rf "$dir/f"
  mkdir -p "$dir/f"
  cp "$dir/www/tinyshakespeare/input.txt" "$dir/f/input.txt.part"
  echo -n "$more" >>"$dir/f/input.txt.part"
  prepare shakespeare --tokenizer bytes --base-url "$url" --out "$dir/f/s" || fail "a whole .part${more:+ and $more} failed"
  same_shards "$dir/s/s" "$dir/f/s"
done

# The file has changed since the download broke off: it starts over.
rm -rf "$dir/f"
mkdir -p "$dir/f"
echo 'Another version.' >"$dir/f/input.txt.part"
echo -n '"1"' >"$dir/f/input.txt.part.etag"
prepare shakespeare --tokenizer bytes --base-url "$url" --out "$dir/f/s" || fail "a file that has changed was refused"
same_shards "$dir/s/s" "$dir/f/s"

# A download is on disk before it has its name.
python3 - "$url" "$dir/f/copy.txt" <<'PY' || fail "a download may be empty after a crash"
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import prepare
done, fsync, replace = [], os.fsync, os.replace
os.fsync, os.replace = lambda fd: done.append("fsync") or fsync(fd), lambda *names: done.append("replace") or replace(*names)
prepare.download(f"{sys.argv[1]}/tinyshakespeare/input.txt", sys.argv[2])
assert done == ["fsync", "replace"], done
PY

# kill -9 at any time: the next start resumes, and the shards are the same; with several processes too.
prepare tinystories --tokenizer bytes --base-url "$url" --out "$dir/t/t" --shard-size 100000 || fail "tinystories failed"
[ "$(compgen -G "$dir/t/t_train_*.bin" | wc -l)" -gt 5 ] || fail "no shards were cut"
for seconds in 0.15 0.2 0.25 0.3 0.35; do
  { timeout -s KILL $seconds python3 data/prepare.py tinystories --tokenizer bytes --base-url "$url" --out "$dir/k/t" \
    --shard-size 100000 --workers 1 >"$dir/out"; } 2>/dev/null || true
done
prepare tinystories --tokenizer bytes --base-url "$url" --out "$dir/k/t" --shard-size 100000 || fail "no resume after kill -9"
same_shards "$dir/t/t" "$dir/k/t"
prepare tinystories --tokenizer bytes --base-url "$url/none" --out "$dir/k/t" --shard-size 100000 || fail "downloaded again after completion"

# A limited number of tokens; then all of them.
prepare tinystories --tokenizer bytes --base-url "$url" --out "$dir/m/t" --shard-size 100000 --tokens 150000 || fail "--tokens"
[ "$(stat -c %s "$dir/m/t_train_000101.bin")" = $((1024 + 2 * 50000)) ] || fail "--tokens was not respected"
prepare tinystories --tokenizer bytes --base-url "$url" --out "$dir/m/t" --shard-size 100000 || fail "no more tokens"
same_shards "$dir/t/t" "$dir/m/t"
prepare tinystories --tokenizer bytes --base-url "$url" --out "$dir/m/t" --shard-size 100000 --tokens 1000 || fail "fewer tokens"
grep -q '^notice: earlier runs wrote .* training tokens, more than 1,000; give another --out' "$dir/out" ||
  fail "nothing says that there are more tokens than requested"

# Refusals: one line each, and nothing lost.
refused() { # WORD ARGUMENTS...
  local word=$1 status=0
  shift
  prepare "$@" || status=$?
  [ "$status" = 1 ] || fail "status $status instead of 1: $*"
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
  [ "$(wc -l <"$dir/err")" = 1 ] || fail "more than one line: $*"
}
refused 404 shakespeare --tokenizer bytes --base-url "$url/nowhere" --out "$dir/r/r"
refused /none shakespeare --tokenizer "$dir/none" --base-url "$url" --out "$dir/r/r"
[ ! -e "$dir/r" ] || fail "a folder was left although nothing came of it"
mkdir "$dir/r"
refused 404 shakespeare --tokenizer bytes --base-url "$url/nowhere" --out "$dir/r/r"
[ -d "$dir/r" ] || fail "a folder that was there before was removed"
refused 'shakespeare.*input.txt: unknown url type.*begins with https://' shakespeare --tokenizer bytes \
  --base-url example.com/shakespeare --out "$dir/r/r"
for listing in '<html>' '{"error": "no such dataset"}' '[{"name": "a"}]'; do
  echo "$listing" >"$dir/listing.json"
  refused 'main/data?recursive=true: found .*, expected a JSON list of files' fineweb-edu --config all --tokenizer bytes \
    --base-url "$url" --out "$dir/l/l"
done
refused 'input.txt yields more than 100 shards of 500 tokens: raise --shard-size' shakespeare --tokenizer bytes \
  --base-url "$url" --out "$dir/many/s" --shard-size 500
refused 'another --out' tinystories --tokenizer bytes --base-url "$url" --out "$dir/t/t" --shard-size 50000
mkdir "$dir/o" && echo mine >"$dir/o/s_train_000000.bin"
refused 'exists already' shakespeare --tokenizer bytes --base-url "$url" --out "$dir/o/s"
[ "$(cat "$dir/o/s_train_000000.bin")" = mine ] || fail "a shard of another origin was overwritten"
refused 'resumes where it stopped' shakespeare --tokenizer bytes --base-url http://127.0.0.1:1 --out "$dir/u/s"
before=$(grep -c input.txt "$dir/requests")
(ulimit -f 20; refused 'input.txt.part: cannot be written: File too large; .*ulimit -f' shakespeare --tokenizer bytes --base-url "$url" \
  --out "$dir/full/s")
[ "$(grep -c input.txt "$dir/requests")" = $((before + 1)) ] || fail "a file that cannot be written was requested again"
[ "$(cd "$dir/full" && echo *)" = "input.txt.part input.txt.part.etag s.prepare.json" ] || fail "a part of a download was not kept"
mkdir -p "$dir/folder/input.txt.part.etag"
refused 'input.txt.part.etag: cannot be written: Is a directory' shakespeare --tokenizer bytes --base-url "$url" --out "$dir/folder/s"
cat >"$dir/lock.py" <<'PY'
import fcntl, subprocess, sys
lock = open(sys.argv[1], "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
sys.exit(subprocess.call(sys.argv[2:]))
PY
mkdir -p "$dir/busy"
for lock in input.txt s; do   # of a download, and of the shards
  before=$(grep -c input.txt "$dir/requests")
  prepare() { python3 "$dir/lock.py" "$dir/busy/$lock.lock" python3 data/prepare.py "$@" >"$dir/out" 2>"$dir/err"; }
  refused "$lock.lock: another process is writing there" shakespeare --tokenizer bytes --base-url "$url" --out "$dir/busy/s"
  [ "$(grep -c input.txt "$dir/requests")" = "$before" ] || fail "downloads what another process downloads"
done

# On a file system without locks a program warns, and goes on. Any other fault of a lock is an error.
cat >"$dir/unlocked.py" <<'PY'
import errno, fcntl, os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import programs
def lockf(*_):
    number = getattr(errno, sys.argv[2])
    raise OSError(number, os.strerror(number))
fcntl.lockf = lockf
def main(_):
    with programs.locked(sys.argv[1]):
        print(os.path.exists(sys.argv[1]))
programs.run_program("unlocked.py", main)
PY
for number in ENOLCK ENOSYS EOPNOTSUPP EINVAL; do
  [ "$(python3 "$dir/unlocked.py" "$dir/unlocked.lock" $number 2>"$dir/err")" = True ] || fail "without locks: $number"
  [[ $(cat "$dir/err") == "WARNING: $dir/unlocked.lock cannot be locked, on a file system without locks ("* ]] ||
    fail "without locks: $number"
  [ ! -e "$dir/unlocked.lock" ] || fail "a lock stays behind"
done
for error in 'EACCES another process is writing there' 'EAGAIN another process is writing there' \
  'EIO cannot be written: Input/output error; choose a place'; do
  ! python3 "$dir/unlocked.py" "$dir/unlocked.lock" "${error%% *}" >"$dir/out" 2>"$dir/err" || fail "a lock with $error"
  [[ $(cat "$dir/err") == "unlocked.py: error: $dir/unlocked.lock: ${error#* }"* ]] || fail "a lock with $error"
done

# What a killed process has left of a file that it was replacing is removed when the file is replaced again. What is
# another host's, or is being written in a process of whatever number, stays; without locks, all does.
mkdir "$dir/replaced"
python3 - "$dir/replaced/[marker].json" <<'PY' || fail "what killed processes left of a file"
import errno, fcntl, os, socket, subprocess, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import programs
path = sys.argv[1]
def left():
    return {os.path.join(os.path.dirname(path), name) for name in os.listdir(os.path.dirname(path))}
def replace(path):
    with programs.replacing(path) as file:
        file.write("done")
    assert open(path).read() == "done"
def begin_to_replace():
    process = subprocess.Popen([sys.executable, "-c", """
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import programs
with programs.replacing(sys.argv[1]) as file:
    print("begun", flush=True)
    file.write(input())
""", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process
def kill(process):
    process.kill()
    process.communicate()
kill(begin_to_replace())
[abandoned] = left()
foreign = abandoned.replace(f".{socket.gethostname()}.", f".not-{socket.gethostname()}.")
open(foreign, "w").close()
writer = begin_to_replace()
[written] = left() - {foreign}
def no_such_process(*_):
    raise ProcessLookupError
real_kill, os.kill = os.kill, no_such_process   # one of another container has no number here
replace(path)
os.kill = real_kill
assert left() == {foreign, written, path}, left()
writer.communicate("by the writer\n")
assert writer.returncode == 0 and open(path).read() == "by the writer" and left() == {foreign, path}, left()

kill(begin_to_replace())
[abandoned] = left() - {foreign, path}
real_lockf = fcntl.lockf
def no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.lockf = no_locks
replace(path)
assert left() == {foreign, abandoned, path}, left()

# A file that is taken for abandoned before it is locked is made again.
def removed_before(file, how):
    os.remove(file.name)
    fcntl.lockf = real_lockf
    real_lockf(file, how)
fcntl.lockf = removed_before
replace(path + ".2")
assert left() == {foreign, abandoned, path, path + ".2"}, left()
PY

# A vocabulary of which gpt2_tokenizer.bin cannot be made: the trainer reads its tokenizer.json itself.
cat >"$dir/characters.py" <<'PY'
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import prepare, programs, text_tokenizers
class Characters(text_tokenizers.ByteTokenizer):
    def token_bytes(self, token):
        raise programs.DataError("token 0 stands for no byte")
prepare.make_tokenizer = lambda options: tokenizer
tokenizer = Characters()
tokenizer.for_trainer = sys.argv.pop(1) == "for_trainer"
programs.run_program("prepare.py", prepare.main)
PY
prepare() { python3 "$dir/characters.py" "$@" >"$dir/out" 2>"$dir/err"; }
refused 'error: token 0 stands for no byte' no shakespeare --base-url "$url" --tokenizer bytes --out "$dir/c/s"
[ ! -e "$dir/c" ] || fail "an unusable tokenizer is refused late"
prepare for_trainer shakespeare --base-url "$url" --tokenizer bytes --out "$dir/c/s" || fail "a tokenizer of the trainer was refused"
grep -q '^notice: token 0 .*; no gpt2_tokenizer.bin is written' "$dir/out" || fail "nothing says that gpt2_tokenizer.bin is missing"
same_shards "$dir/s/s" "$dir/c/s"
[ ! -e "$dir/c/gpt2_tokenizer.bin" ] || fail "a gpt2_tokenizer.bin without tokens"

# The texts of packages: an archive that an interrupted run left is replaced, and only a package that is in no list is
# left out.
mkdir -p "$dir/bin" "$dir/package/DEBIAN" "$dir/package/usr/share/man/man1"
printf 'Package: manpages\nVersion: 2\nArchitecture: all\nMaintainer: nobody\nDescription: a page\n' \
  >"$dir/package/DEBIAN/control"
echo 'a page' | gzip >"$dir/package/usr/share/man/man1/page.1.gz"
chmod -R u=rwX,go=rX "$dir/package"
dpkg-deb --build "$dir/package" "$dir/manpages_2_all.deb" >"$dir/out"
cat >"$dir/bin/apt-get" <<'SH'
#!/usr/bin/env bash
echo "${!#}" >>"$FAKE/asked"
case ${!#}${FAKE_OFFLINE:+-offline} in
  manpages) cp "$FAKE/manpages_2_all.deb" . ;;
  manpages-dev-offline) echo 'E: Failed to fetch http://nowhere/manpages-dev.deb' >&2 && exit 100 ;;
  *) echo "E: Unable to locate package ${!#}" >&2 && exit 100 ;;
esac
SH
chmod +x "$dir/bin/apt-get"
gather() { FAKE=$dir PATH=$dir/bin:$PATH python3 data/gather_texts.py --out "$dir/texts" >"$dir/out" 2>"$dir/err"; }
mkdir -p "$dir/texts/packages"
echo damaged >"$dir/texts/packages/manpages_1_all.deb"
gather || fail "gather_texts.py failed"
grep -q ' in 1 documents' "$dir/out" || fail "gather_texts.py: not one text"
grep -q '^gather_texts.py: manpages-dev is in no package list' "$dir/err" || fail "gather_texts.py: nothing says what is left out"
if FAKE_OFFLINE=yes gather; then fail "gather_texts.py goes on without the network"; fi
grep -q '^gather_texts.py: apt-get download manpages-dev: E: Failed to fetch .*; check the network' "$dir/err" ||
  fail "gather_texts.py: what apt-get says is not passed on"
[ "$(grep -cx manpages "$dir/asked")" = 1 ] || fail "gather_texts.py downloads a package again"

# The parts of FineWeb-Edu, here as text: files of one name in two folders are two; each is what the list says.
cat >"$dir/fineweb.py" <<'PY'
import dataclasses, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import prepare, programs
prepare.DATASETS["fineweb-edu"] = dataclasses.replace(prepare.DATASETS["fineweb-edu"], separator=b"\n\n")
programs.run_program("prepare.py", prepare.main)
PY
prepare() { python3 "$dir/fineweb.py" fineweb-edu --config all --tokenizer bytes --base-url "$url" "$@" >"$dir/out" 2>"$dir/err"; }
list() { # FOLDER...: what the server lists
  python3 - "$dir" "$@" <<'PY'
import hashlib, json, os, sys
directory, *names = sys.argv[1:]
entries = []
for name in names:
    path = f"data/CC-MAIN-2024-{name}/000_00000.parquet"
    os.makedirs(os.path.dirname(f"{directory}/www/{path}"), exist_ok=True)
    text = "".join(f"document {i} of {name}\n\n" for i in range(int(name) * 100)).encode()
    open(f"{directory}/www/{path}", "wb").write(text)
    entries.append({"type": "file", "path": path, "lfs": {"oid": hashlib.sha256(text).hexdigest()}})
json.dump(entries, open(f"{directory}/listing.json", "w"))
PY
}
list 10 51
prepare --keep-downloads --out "$dir/w/w" || fail "fineweb-edu as text failed"
for name in 10 51; do
  cmp "$dir/w/data--CC-MAIN-2024-$name--000_00000.parquet" "$dir/www/data/CC-MAIN-2024-$name/000_00000.parquet" ||
    fail "files of one name in two folders are taken for each other"
done
all=$(grep '^train ' "$dir/out")
prepare --tokens 10 --out "$dir/w/w" || fail "fewer tokens"
grep -qxF "$all" "$dir/out" || fail "shards of earlier runs are not counted"
python3 - "$dir/w/w.done-0000.json" <<'PY'
import json, sys
record = json.load(open(sys.argv[1]))
assert record.pop("url") == "datasets/HuggingFaceFW/fineweb-edu/resolve/main/data/CC-MAIN-2024-10/000_00000.parquet"
json.dump(record, open(sys.argv[1], "w"))   # as earlier versions wrote it
PY
prepare --out "$dir/w/w" || fail "a record of an earlier version was refused"
list 10 30 51
refused 'w.done-0001.json: made of .*2024-51.* is now .*2024-30.*another --out' --out "$dir/w/w"
echo changed >"$dir/www/data/CC-MAIN-2024-10/000_00000.parquet"
refused 'downloaded with SHA-256 .*, expected .*try again' --out "$dir/x/x"
[ ! -e "$dir/x" ] || fail "a damaged file was left"

# A vocabulary like GPT-2's, and parquet.
if python=$(scripts/find_python.sh tiktoken); then
  python3 - "$dir" <<'PY'
import base64, sys
tokens = [bytes([b]) for b in range(256)] + [b"on", b"st", b" st", b"or", b"ory", b" story", b"\xc3\xa9"]
with open(sys.argv[1] + "/toy.tiktoken", "wb") as file:
    for rank, token in enumerate(tokens):
        file.write(base64.b64encode(token) + b" %d\n" % rank)
PY
  "$python" data/write_tokenizer.py "$dir/toy.tiktoken" "$dir/toy.bin" >"$dir/out" 2>"$dir/err" || fail "write_tokenizer failed"
  python3 - "$dir/toy.bin" <<'PY' || fail "toy.bin is wrong"
import struct, sys
data = open(sys.argv[1], "rb").read()
assert struct.unpack("<4I", data[:16]) == (20240328, 2, 264, 263)
tokens, at = [], 1024
while at < len(data):
    tokens.append(data[at + 1:at + 1 + data[at]])
    at += 1 + data[at]
assert len(tokens) == 264 and tokens[65] == b"A" and tokens[261] == b" story" and tokens[263] == b"<|endoftext|>"
PY
  "$python" data/prepare.py tinystories --tokenizer "$dir/toy.tiktoken" --base-url "$url" --out "$dir/b/t" --tokens 1000 \
    >"$dir/out" 2>"$dir/err" || fail "tiktoken failed"
else
  echo "datasets_test: tiktoken skipped: no Python here has it"
fi
if python=$(scripts/find_python.sh pyarrow); then
  mkdir -p "$dir/www/sample/10BT"
  "$python" - "$dir" <<'PY'
import sys, pyarrow, pyarrow.parquet
for index in (0, 1):
    rows = [f"document {index} {i}\nof the web" for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(3000)), "text": rows}), f"{sys.argv[1]}/www/sample/10BT/00{index}_00000.parquet")
PY
  "$python" data/prepare.py fineweb-edu --tokenizer bytes --base-url "$url" --out "$dir/p/p" --tokens 80000 \
    >"$dir/out" 2>"$dir/err" || fail "fineweb-edu failed"
  grep -q 'source 2 of 2' "$dir/out" || fail "the second page of the list was not read"
  grep -q 'train  80,000 tokens' "$dir/out" || fail "wrong number of tokens"
  ls "$dir"/p/p_val_0000*.bin >/dev/null || fail "no validation shards"
else
  echo "datasets_test: parquet skipped: no Python here has pyarrow"
fi
echo "datasets_test: ok"
