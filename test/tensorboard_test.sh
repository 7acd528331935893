#!/usr/bin/env bash
# scripts/tensorboard.py: every number comes out of the event file again, also while a run goes on and after it was cut.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'kill "${follower:-}" 2>/dev/null || true; rm -rf "$dir"' EXIT
fail() {
  echo "tensorboard_test: $1" >&2
  exit 1
}

# A reader of event files, written apart from the exporter.
cat >"$dir/read.py" <<'PY'
import importlib.util, json, os, struct, sys
spec = importlib.util.spec_from_file_location("tensorboard_export", "scripts/tensorboard.py")
export = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode = True
spec.loader.exec_module(export)
assert export.crc32c(b"123456789") == 0xE3069283   # the published check value
assert export.crc32c(bytes(32)) == 0x8A9136AA      # RFC 3720, B.4

def fields(data):
    at = 0
    def number():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at += 1
            if data[at - 1] < 128:
                return value
            shift += 7
    while at < len(data):
        tag = number()
        if tag & 7 == 0: value = number()
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or number()
            value, at = data[at:at + size], at + size
        yield tag >> 3, value

data, points, at = open(sys.argv[1], "rb").read(), {}, 0
first = True
while at < len(data):
    size, crc = struct.unpack_from("<QI", data, at)
    body = data[at + 12:at + 12 + size]
    assert struct.unpack_from("<I", data, at + 12 + size)[0] == export.masked_crc(body)
    assert crc == export.masked_crc(data[at:at + 8])
    at += size + 16
    event = dict(fields(body))
    if first: assert event[3] == b"brain.Event:2"
    first = False
    if 7 in event:   # START: what was read from this step on is void
        points = {key: value for key, value in points.items() if key[1] < event[2]}
    if 5 in event:
        assert 1.6e9 < struct.unpack("<d", event[1])[0] < 1e10
        for _, value in fields(event[5]):
            value = dict(fields(value))
            points[value[1].decode(), event[2]] = struct.unpack("<f", value[2])[0]
expected = {}
for line in open(sys.argv[2]):
    try: line = json.loads(line)
    except ValueError: continue
    for name, value in line.items():
        if isinstance(value, float): expected[f"{line['kind']}/{name}", line["step"]] = struct.unpack("<f", struct.pack("<f", value))[0]
assert points == expected, (sorted(points.items())[:3], sorted(expected.items())[:3])
print(len(points))
PY

line() { # KIND STEP LOSS
  printf '{"kind":"%s","step":%d,"loss":%s,"ms":12.5,"skipped":true}\n' "$1" "$2" "$3"
}
mkdir "$dir/run"
metrics=$dir/run/metrics.jsonl events=$dir/run/tensorboard/events.out.tfevents.0000000001.train_gpt
{ line val 0 5.5; line train 1 5.25; line train 300 null; line train 301 0.1234567890123; printf '{"kind":"tr'; } >"$metrics"
for _ in 1 2; do scripts/tensorboard.py "$dir/run" >"$dir/out" || fail "the export failed"; done   # twice: no duplicates
[ "$(python3 "$dir/read.py" "$events" "$metrics")" = 7 ] || fail "the event file does not hold the numbers"

# A running run, then a resume that cuts what the last start had written behind step 1.
scripts/tensorboard.py "$dir/run" --follow --every 0.05 >"$dir/out" &
follower=$!
wait_for() {
  for _ in $(seq 100); do
    if python3 "$dir/read.py" "$events" "$metrics" >/dev/null 2>&1; then return; fi
    sleep 0.05
  done
  fail "$1"
}
until [ -s "$dir/out" ]; do sleep 0.05; done
{ line val 0 5.5; line train 1 5.25; line train 2 5.0; } >"$dir/new"
mv "$dir/new" "$metrics"
wait_for "a cut file was not followed"
line train 3 4.5 >>"$metrics"
wait_for "a new line was not followed"

if scripts/tensorboard.py "$dir/nowhere" 2>"$dir/err"; then fail "took a missing run"; fi
grep -q nowhere "$dir/err" || fail "the error does not name the run"
echo "tensorboard_test: ok"
