#!/usr/bin/env bash
# scripts/plot_plan.py draws plans of all kinds of layouts as PNG and as one page without references to anything else;
# what is no plan is refused by name.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
fail() {
  echo "plot_plan_test: $1" >&2
  exit 1
}
# refuses TEXT ARGUMENT...: exit status 1, with TEXT in one line
refuses() {
  local text=$1 status=0
  shift
  plot "$@" >"$dir/out" 2>"$dir/err" || status=$?
  [ $status -eq 1 ] || fail "$* exited with $status"
  [[ $(<"$dir/err") == "plot_plan.py: "*"$text"* && $(wc -l <"$dir/err") -eq 1 ]] ||
    fail "$* was refused without '$text': $(<"$dir/err")"
}
plot() { "$python" scripts/plot_plan.py "$@"; }
plan() { # NAME OPTION...: makes NAME.json
  local name=$1
  shift
  ./train_gpt --plan --json --sample-every 0 --dtype bf16 -b 1 -t 1024 "$@" >"$dir/$name.json"
}

python=$(scripts/find_python.sh matplotlib) || python=python3
plan one --machine rtx4090x1 --ranks 1 --model gpt2:124M --total-batch-size 8192
plan two --machine h100x8 --ranks 2 --model gpt2:124M --zero-stage 1 --total-batch-size 8192
plan zero --machine h100x8 --ranks 8 --model llama3:8B --zero-stage 3 --total-batch-size 32768
plan experts --machine h100x8 --ranks 16 --model mixtral:8x7B --ep 8 --zero-stage 1 --recompute block
plan pipeline --machine h100x8 --ranks 32 --model llama3:8B --pp 4 --tp 2 --schedule zb-v --total-batch-size 65536
plan interleaved --machine h100x8 --ranks 8 --model llama3:8B --pp 4 --schedule interleaved --total-batch-size 65536
plan slices --machine h100x8 --ranks 8 --model llama3:8B --pp 4 --token-slices 4 --tp 2
plan many --machine h100x8 --ranks 1 --model d1 --total-batch-size 16777216           # too many passes to draw
plan server --device cpu --local-ranks 4 --model d4 --dp-sync parameter-server        # no times, two kinds of ranks
echo '{"step_seconds": 1}' >"$dir/part.json"
echo '[1, 2]' >"$dir/list.json"
echo 'plan for h100x8' >"$dir/text.json"
# The system's Python is tried once where there is no matplotlib, which is hidden here.
mkdir -p "$dir/hidden" "$dir/venv/bin"
echo 'import sys; sys.modules["matplotlib"] = None' >"$dir/hidden/sitecustomize.py"
PYTHONPATH=$dir/hidden refuses 'matplotlib is missing' "$dir/one.json"
if [ "$(scripts/find_python.sh matplotlib)" = "" ]; then
  refuses 'matplotlib is missing' "$dir/one.json"
  echo 'plot_plan_test: ok, but nothing was plotted: matplotlib is missing'
  exit
fi

[ "$(plot "$dir/one.json")" = "plot: $dir/one.png" ] || fail "the default output of one plan"
# A virtual environment of the system's Python does not see its modules.
if /usr/bin/python3 -c 'import matplotlib' 2>/dev/null; then
  ln -s /usr/bin/python3 "$dir/venv/bin/python3"
  printf '%s\n' 'home = /usr/bin' 'include-system-site-packages = false' >"$dir/venv/pyvenv.cfg"
  "$dir/venv/bin/python3" scripts/plot_plan.py "$dir/one.json" >"$dir/out" 2>&1 ||
    fail "in a virtual environment: $(<"$dir/out")"
  "$dir/venv/bin/python3" scripts/plot_plan.py /dev/stdin -o "$dir/one.png" < <(cat "$dir/one.json") >"$dir/out" 2>&1 ||
    fail "in a virtual environment, from a pipe: $(<"$dir/out")"
fi
for name in two zero experts pipeline interleaved slices many server; do
  plot "$dir/$name.json" -o "$dir/$name.png" --html "$dir/$name.html" >"$dir/out" || fail "$name was not drawn"
  [ "$(<"$dir/out")" = "plot: $dir/$name.png
plot: $dir/$name.html" ] || fail "$name was written elsewhere: $(<"$dir/out")"
done
plot "$dir/one.json" "$dir/two.json" -o "$dir/ranks.png" >"$dir/out"   # speed over ranks
plot "$dir/zero.json" "$dir/experts.json" "$dir/server.json" -o "$dir/mixed.png" --html "$dir/mixed.html" >"$dir/out"

# PNGs: their parts' checksums, sizes and pixels, of which there are many colours; pages: one file, with the numbers.
"$python" - "$dir" <<'PY' || fail "a picture or a page is not as it should be"
import base64, glob, html.parser, json, os, struct, sys, zlib

def pixels(data):
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8:at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack_from(">I", data, at + 8 + size)[0]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", body)
        if kind == b"IDAT":
            packed += body
        at += size + 12
    assert (depth, colour, kind) == (8, 6, b"IEND"), (depth, colour, kind)
    assert len(zlib.decompress(packed)) == height * (1 + 4 * width)
    return width, height

class Page(html.parser.HTMLParser):
    """Its tags are closed, and nothing is loaded from elsewhere."""
    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.image = [], [], None
        self.feed(text)
        assert self.open == [], self.open
    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            assert name not in ("href", "src") or value.startswith("data:image/png;base64,"), value[:60]
            if name == "src":
                self.image = base64.b64decode(value.split(",")[1], validate=True)
        if tag not in ("meta", "img"):
            self.open.append(tag)
    def handle_endtag(self, tag):
        assert self.open.pop() == tag
    def handle_data(self, data):
        self.text.append(data)

directory = sys.argv[1]
pictures = glob.glob(f"{directory}/*.png")
assert len(pictures) == 11, pictures
for path in pictures:
    width, height = pixels(open(path, "rb").read())
    assert width > 1000 and height > 200, (path, width, height)
for path in glob.glob(f"{directory}/*.html"):
    page = Page(open(path, encoding="utf-8").read())
    pixels(page.image)
    names = ["zero", "experts", "server"] if "mixed" in path else [os.path.basename(path)[:-5]]
    for name in names:
        plan = json.load(open(f"{directory}/{name}.json"))
        for stage in plan["stages"]:
            for part in stage["memory"]:
                assert part["name"] in page.text and f"{part['bytes'] / 2**30:.3f}" in page.text, (path, part)
        if plan["time"]:
            assert f"{plan['tokens_per_second']:,.0f}" in page.text
            for loss in plan["time"]["losses"]:
                assert loss["remedy"] in page.text or loss["seconds"] <= 0.01 * plan["step_seconds"], (path, loss)
PY
# Groups that several plans expose have a colour each.
"$python" - "$dir"/{zero,pipeline,experts}.json <<'PY' || fail "two groups have one colour"
import json, sys
sys.path.insert(0, "scripts")
import plot_plan
plt = plot_plan.load_pyplot(plot_plan.fail)
from matplotlib.patches import Patch
with open(plot_plan.COLOURS) as file:
    colours = json.load(file)["time"]
axis = plt.subplots()[1]
plot_plan.draw_split(axis, [plot_plan.read_plan(path) for path in sys.argv[1:]], colours, Patch)
shown = axis.get_legend()
used = [patch.get_facecolor() for patch, text in zip(shown.get_patches(), shown.get_texts())
        if text.get_text().startswith("exposed: ")]
assert 3 <= len(used) == len(set(used)), used
PY
# A name is text, not markup, and no formula.
cp "$dir/one.json" "$dir/\$^\$.json"
plot "$dir/\$^\$.json" >"$dir/out" || fail "a name with dollars was not drawn"
sed 's/"llama3:8B"/"<img src=x onerror=alert(1)>"/' "$dir/zero.json" >"$dir/<b>.json"
plot "$dir/<b>.json" --html "$dir/markup" >"$dir/out"
! grep -q '<img src=x\|<b>' "$dir/markup" || fail "a model's name became markup"

refuses 'no "tokens_per_second"; expected what ./train_gpt --plan --json prints' "$dir/part.json"
refuses 'no "step_seconds"; expected what' "$dir/list.json"
refuses 'not JSON; expected what' "$dir/text.json"
refuses 'cannot read' "$dir/none.json"
refuses 'name the output with -o FILE.png or --html FILE.html' "$dir/one.json" "$dir/two.json"
refuses 'cannot write /dev/null/x.png' "$dir/one.json" -o /dev/null/x.png
echo 'plot_plan_test: ok'
