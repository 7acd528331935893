#!/usr/bin/env bash
# scripts/tensorboard.py: every number is in the event file, also while a run continues and after a truncation.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
follower=
trap '[ -z "$follower" ] || kill "$follower" 2>/dev/null || true; rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
python() { python3 -S "$@"; } # only the standard library
tensorboard() { python scripts/tensorboard.py "$@" 2>"$dir/err" >"$dir/out"; }
fail() {
  echo "tensorboard_test: $1" >&2
  cat "$dir/err" >&2
  exit 1
}

# The checksum, against published values: the check value of CRC-32C and RFC 3720, B.4.
python - <<'PY' 2>"$dir/err" || fail "the checksum is not CRC-32C"
import sys
sys.path.insert(0, "scripts")
from tensorboard import crc32c
assert crc32c(b"123456789") == 0xE3069283
assert crc32c(b"") == 0
assert crc32c(bytes(32)) == 0x8A9136AA
assert crc32c(b"\xff" * 32) == 0x62A8AB43
assert crc32c(bytes(range(32))) == 0x46DD794E
assert crc32c(bytes(reversed(range(32)))) == 0x113FDB5C
PY

# An independent reader: read.py METRICS EVENTS... compares the event files, read in order as TensorBoard does, with the
# metrics, and prints the number of points.
cat >"$dir/read.py" <<'PY'
import json, os, struct, sys

def crc(data):  # bit by bit
    value = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        value = value >> 1 ^ (0x82F63B78 if (value ^ bit) & 1 else 0)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) % 2**32

def fields(data):
    at = 0
    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(data):
        tag = number()
        if tag % 8 == 0:
            value = number()
        else:
            size = {1: 8, 2: None, 5: 4}[tag % 8] or number()
            assert at + size <= len(data)
            value, at = data[at:at + size], at + size
        yield tag >> 3, tag % 8, value

points, times, started = {}, [], False
for path in sys.argv[2:]:
    data, at, version = open(path, "rb").read(), 0, None
    while at < len(data):
        size, of_size = struct.unpack_from("<QI", data, at)
        body, = struct.unpack_from(f"{size}s", data, at + 12)
        of_body, = struct.unpack_from("<I", data, at + 12 + size)
        assert of_size == crc(data[at:at + 8]) and of_body == crc(body), f"checksum at byte {at}"
        at += size + 16
        event = {number: value for number, _, value in fields(body)}
        assert {(n, w) for n, w, _ in fields(body)} <= {(1, 1), (2, 0), (3, 2), (5, 2), (7, 2)}
        if version is None:
            version = event[3]
            assert version == b"brain.Event:2", version
        if 7 in event:
            assert event[7] == b"\x08\x01", event[7]  # status = START
            if started:  # TensorBoard takes a run's first START as its beginning and purges at later ones
                points = {key: value for key, value in points.items() if key[1] < event[2]}
            started = True
        if 5 in event:
            times.append(struct.unpack("<d", event[1])[0])
            for number, _, value in fields(event[5]):
                value = {n: v for n, _, v in fields(value)}
                key = value[1].decode(), event[2]
                assert number == 1 and key not in points, f"{key} twice"
                points[key], = struct.unpack("<f", value[2])

expected, took = {}, 0.0
for line in open(sys.argv[1]):
    try:
        line = json.loads(line)
    except ValueError:
        continue
    for name, value in line.items():
        if "kind" in line and name not in ("kind", "step") and type(value) in (int, float):
            expected[f"{line['kind']}/{name}", line["step"]] = struct.unpack("<f", struct.pack("<f", value))[0]
assert points == expected, sorted(set(points.items()) ^ set(expected.items()))[:5]
if len(sys.argv) == 3 and times:  # in order, the last one not after the file's
    assert times == sorted(times) and abs(times[-1] - os.stat(sys.argv[1]).st_mtime) < 60, times
print(len(points))
PY
read_events() { python "$dir/read.py" "$@" 2>"$dir/err"; }

train() { # STEP LOSS
  printf '{"kind":"train","step":%d,"loss":%s,"grad_norm":1.5e-3,"lr":0.0006,' "$1" "$2"
  printf '"ms":12.5,"tokens_per_s":40960,"mfu":0.25}\n'
}
val() { printf '{"kind":"val","step":%d,"loss":%s}\n' "$1" "$2"; }

# All numbers of a run, of any name and size; nothing else.
mkdir "$dir/run"
metrics=$dir/run/metrics.jsonl logdir=$dir/run/tensorboard
{
  val 0 5.5
  train 1 5.25
  train 127 null
  train 128 -0.1234567890123
  train 5000000000 1e-30
  printf '{"kind":"other","step":3,"\xc3\xa4":7,"large":1e300,"flag":true,"text":"no","list":[1]}\n\n'
  printf '{"note":"no step"}\n'
  printf '{"kind":"tr'
} >"$metrics"
tensorboard "$dir/run" || fail "the export failed"
events=("$logdir"/*)
[ ${#events[@]} = 1 ] || fail "left more than one event file: ${events[*]}"
sed 's/"large":1e300,//' "$metrics" >"$dir/expected.jsonl" # more than a 32-bit float holds
[ "$(read_events "$dir/expected.jsonl" "${events[@]}")" = 25 ] || fail "the event file does not hold the numbers"
python - "$dir" "${events[0]}" <<'PY' || fail "a step does not take its ms"
import struct, sys
data = open(sys.argv[2], "rb").read()
at, times = 0, {}
while at < len(data):  # a record of ours begins with wall time and step
    size, = struct.unpack_from("<Q", data, at)
    times[data[at + 22]] = struct.unpack_from("<d", data, at + 13)[0]
    at += size + 16
assert abs(times[127] - times[1] - 0.0125) < 1e-5, times
PY

# A line that states its time keeps it.
mkdir "$dir/timed"
printf '{"kind":"train","step":%d,"loss":1,"ms":5,"time":"2026-01-31T23:59:%dZ","elapsed_s":7}\n' 1 10 2 42 \
  >"$dir/timed/metrics.jsonl"
tensorboard "$dir/timed" || fail "the export failed"
python - "$dir"/timed/tensorboard/* <<'PY' || fail "a line does not have its own time"
import struct, sys
data = open(sys.argv[1], "rb").read()
at, times = 0, []
while at < len(data):
    size, = struct.unpack_from("<Q", data, at)
    times.append(struct.unpack_from("<d", data, at + 13)[0])
    at += size + 16
assert times[-2:] == [1769903950.0, 1769903982.0], times
PY

# A second export repeats no point, neither in the new file nor for a reader that had already read the old one.
cp "${events[0]}" "$dir/before"
{ train 1 4.25; val 1 4.5; } >"$metrics" # a complete object counts even without a newline
truncate -s -1 "$metrics"
tensorboard "$dir/run" || fail "the second export failed"
again=("$logdir"/*)
if [ "${again[0]}" != "${events[0]}" ] || [ ${#again[@]} != 2 ]; then # still there, and sorted before the new one
  fail "a running TensorBoard does not continue from ${events[0]}: ${again[*]}"
fi
[ ! -s "${again[0]}" ] || fail "the second export left the first one's points"
[ "$(read_events "$metrics" "$dir/before" "${again[1]}")" = 7 ] || fail "the second export does not supersede the first"
touch -d '2 hours ago' "${again[0]}"
tensorboard "$dir/run" || fail "the third export failed"
[ ! -e "${again[0]}" ] || fail "a file truncated long ago was kept"
[ "$(read_events "$metrics" "$logdir"/*)" = 7 ] || fail "the third export does not hold the numbers"

# Several runs, one of them given by its file.
mkdir -p "$dir/b" "$dir/c/run" "$dir/d/run"
val 3 2.5 >"$dir/b/metrics.jsonl"
cp "$metrics" "$dir/c/run"
cp "$metrics" "$dir/d/run"
tensorboard "$dir/run/" "$dir/b/metrics.jsonl" --logdir "$dir/both" || fail "two runs failed"
[ "$(read_events "$metrics" "$dir"/both/run/*)" = 7 ] || fail "the first of two runs"
[ "$(read_events "$dir/b/metrics.jsonl" "$dir"/both/b/*)" = 1 ] || fail "the second of two runs"

# A run followed from before its first step. $dir/kept is what an open TensorBoard has read.
rm -rf "$logdir" "$metrics"
wait_for() { # MESSAGE POINTS
  local found=
  for _ in $(seq 100); do
    kill -0 "$follower" 2>/dev/null || break
    if [ -e "$metrics" ]; then found=$(read_events "$metrics" "$logdir"/*tfevents* || true); fi
    [ "$found" != "$2" ] || return 0
    sleep 0.1
  done
  cat "$dir/follow" >&2
  fail "$1"
}
follow() {
  rm -f "$dir/follow"
  python3 -S scripts/tensorboard.py "$dir/run" --follow --every 0.03 >"$dir/follow" 2>&1 &
  follower=$!
  until [ -s "$dir/follow" ]; do sleep 0.05; done
}
follow
{ val 0 5.5; train 1 5.25; } >"$metrics"
wait_for "a run that began was not followed" 7
before=("$logdir"/*)
line=$(train 2 5.0)
printf '%s' "${line:0:40}" >>"$metrics"
sleep 0.1
printf '%s\n' "${line:40}" >>"$metrics"
wait_for "a line written in two parts was not followed" 13
{ train 3 4.5; train 4 null; val 4 4.25; } >>"$metrics"
wait_for "new lines were not followed" 25
after=("$logdir"/*)
[ "${before[*]}" = "${after[*]}" ] || fail "new lines started a new file"
cp "${after[0]}" "$dir/kept"

# A resume that replaces the file: with a shorter one ...
{ val 0 5.5; train 1 5.25; } >"$dir/new"
mv "$dir/new" "$metrics"
wait_for "a cut file was not followed" 7
[ "$(read_events "$metrics" "$dir/kept" "$logdir"/*)" = 7 ] || fail "what was cut off is still there"
{ train 2 4.75; train 3 4.5; } >>"$metrics"
wait_for "lines behind the cut were not followed" 19
# ... or with one longer than before by the time anyone looked, here with the same last lines; likewise a file truncated
# in place.
{ val 0 3.5; train 1 5.25; train 2 4.75; train 3 4.5; train 4 4.0; } >"$dir/new"
mv "$dir/new" "$metrics"
wait_for "a file that was replaced by a longer one was not followed" 25
{ val 0 3.5; train 1 5.25; train 2 3.125; train 3 3.0; train 4 2.5; train 5 2.25; } >"$metrics"
wait_for "a file that was written anew was not followed" 31
[ "$(find "$logdir" -type f -size +0 | wc -l)" = 1 ] || fail "following left old points"
rm "$metrics"
sleep 0.1
{ val 0 2.5; train 1 2.25; } >"$metrics"
wait_for "a run that started again was not followed" 7

# Two exports of one run: the follower ends with the reason, rather than write an unreadable file.
ends() { # WORD
  local status=0
  timeout 10 tail -s 0.05 --pid="$follower" -f /dev/null || fail "the follower continues: $1"
  wait "$follower" || status=$?
  follower=
  [ "$status" = 1 ] || fail "the follower ended with status $status instead of 1: $1"
  grep -q "$1" "$dir/follow" || fail "the follower does not say why it ended: $1"
}
tensorboard "$dir/run" || fail "an export next to a follower failed"
ends 'another export'
[ "$(read_events "$metrics" "$logdir"/*)" = 7 ] || fail "a follower and an export corrupt each other's files"

follow
{ train 2 2.0; echo 'not json'; } >>"$metrics"
ends 'line 4: not a JSON object'

# refused WORD ARGUMENTS...: exit status 1, a one-line message containing WORD, and nothing written.
refused() {
  local word=$1 status=0
  shift
  tensorboard "$@" || status=$?
  [ "$status" = 1 ] || fail "status $status instead of 1: $*"
  [ "$(wc -l <"$dir/err")" = 1 ] || fail "more than one line: $*"
  grep -q -- "$word" "$dir/err" || fail "the error does not name '$word': $*"
  [ ! -e "$dir/refused" ] || fail "left something behind: $*"
}
refused nowhere "$dir/c/run" "$dir/nowhere" --logdir "$dir/refused"
refused nowhere "$dir/nowhere" --follow --logdir "$dir/refused"
refused 'both go to' "$dir/d/run" "$dir/c/run" --logdir "$dir/refused"
refused -- --every "$dir/c/run" --follow --every 0 --logdir "$dir/refused"
refused 'File exists' "$dir/c/run" --logdir "$metrics"
mkdir "$dir/bad"
: >"$dir/bad/metrics.jsonl"
refused 'first step' "$dir/bad" --logdir "$dir/refused"
for garbage in '[1, 2]' $'\xff\xfe'; do
  { train 1 2.5; printf '%s\n' "$garbage"; train 2 2.5; } >"$dir/bad/metrics.jsonl"
  refused 'line 2' "$dir/bad" --logdir "$dir/refused"
done
echo "tensorboard_test: ok"
