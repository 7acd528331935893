#!/usr/bin/env bash
# ./train_gpt --print-schedule draws schedules, as text and as JSON; the manual's pictures are the program's;
# scripts/plot_schedule.py plots the JSON, and the files of --trace; impossible schedules, and runs of those that can only
# be drawn, are refused.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
fail() {
  echo "schedule_test: $1" >&2
  exit 1
}
# shows TEXT OPTION...: the picture contains TEXT
shows() {
  local text=$1 picture
  shift
  picture=$(./train_gpt --print-schedule "$@" 2>&1) || fail "$* was refused: $picture"
  [[ $picture == *"$text"* ]] || fail "$*: no '$text' in: $picture"
}
# refuses TEXT COMMAND...: exit status 1, with TEXT, and nothing on stdout
refuses() {
  local text=$1 status=0
  shift
  "$@" >"$dir/out" 2>"$dir/err" || status=$?
  [ $status -eq 1 ] || fail "$* exited with $status"
  [ ! -s "$dir/out" ] || fail "$* printed: $(cat "$dir/out")"
  [[ $(cat "$dir/err") == *"$text"* ]] || fail "$* was refused without '$text': $(cat "$dir/err")"
}

shows 'stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3' --pp 2 --schedule zb-h1
shows '1f1b: 4 stages, 8 micro-batches' --pp 4

# The pictures of the manual, below a line such as "--pp 3 --schedule zb-h1, 4 micro-batches", are those of the program.
pictures=0 asked=()
while IFS= read -r line; do
  if [[ $line =~ ^\ \ --pp\ ([0-9]+)\ --schedule\ ([a-z0-9-]+),\ ([0-9]+)\ micro-batches ]]; then
    asked=(--pp "${BASH_REMATCH[1]}" --schedule "${BASH_REMATCH[2]}" --micro-batches "${BASH_REMATCH[3]}")
  elif [[ $line =~ ^\ \ (stage\ [0-9]+\ \ .*[^ ]) ]] && [ ${#asked[@]} -gt 0 ]; then
    shows "${BASH_REMATCH[1]}"$'\n' "${asked[@]}"
    pictures=$((pictures + 1))
  elif [ -n "$line" ]; then
    asked=()
  fi
done <llmc/parallel/README.md
[ $pictures -ge 10 ] || fail "llmc/parallel/README.md: only $pictures lines of schedules were compared"

shows 'interleaved: 4 stages, 5 micro-batches, 2 chunks per stage' --pp 4 --schedule interleaved --micro-batches 5
shows 'zb-v: 3 stages, 6 micro-batches, 2 chunks per stage' --pp 3 --schedule zb-v
shows 'versions of the weights 3' --pp 3 --schedule pipedream
shows '2 micro-batches in 3 slices' --pp 2 --schedule gpipe --token-slices 3 --micro-batches 2

refuses '--pp-chunks 2 with --schedule 1f1b' ./train_gpt --print-schedule --pp 4 --pp-chunks 2
refuses '--token-slices with --schedule zb-v' ./train_gpt --print-schedule --schedule zb-v --token-slices 2
refuses '--token-slices auto: their number' ./train_gpt --print-schedule --token-slices auto
refuses "--token-slices 'many': expected a whole number" ./train_gpt --print-schedule --token-slices many
refuses '--pp-layout balanced with --print-schedule' ./train_gpt --print-schedule --pp 4 --pp-layout balanced
refuses '--schedule 2f2b: expected one of' ./train_gpt --print-schedule --schedule 2f2b
refuses 'choose one of them' ./train_gpt --print-schedule --plan
refuses '--pp 4 needs a multiple of 4 ranks, and there are 3' ./train_gpt --plan --pp 4 --local-ranks 3
refuses '--schedule zb-h1 is for the stages of a pipeline' ./train_gpt --plan --schedule zb-h1
refuses '--pp-chunks 3 with --schedule zb-v, whose stages have 2 chunks' \
  ./train_gpt --plan --pp 2 --schedule zb-v --pp-chunks 3
refuses '--token-slices with --cp 2: both cut sequences' ./train_gpt --plan --cp 2 --token-slices 2
refuses '--token-slices with --schedule interleaved' ./train_gpt --plan --schedule interleaved --token-slices auto
refuses '--token-slices 99 with --seq-len 64: a slice has at least one token' \
  ./train_gpt --plan --seq-len 64 --token-slices 99
refuses "--token-slices '2,3': expected a whole number from 1 to 1048576, or auto" ./train_gpt --plan --token-slices 2,3
refuses '--micro-batches 4 is for --print-schedule' ./train_gpt --plan --micro-batches 4
refuses 'print-stages, not for training: add one of them' ./train_gpt --json -i test/golden/gpt2_tiny/train.bin

# A lost answer is an error; a reader that has seen enough, or a stdout that was closed from the beginning, is none.
for mode in --help --version '--print-schedule --json --pp 4' '--plan --model gpt2:124M'; do
  read -ra words <<<"$mode"
  status=0
  ./train_gpt "${words[@]}" >/dev/full 2>"$dir/err" || status=$?
  [[ "$status $(cat "$dir/err")" =~ ^'1 train_gpt: cannot write to stdout: '('No space left on device'|'a part is lost; free space, or write elsewhere')$ ]] ||
    fail "$mode on a full disk: status $status, and $(cat "$dir/err")"
  ./train_gpt "${words[@]}" >&- || fail "$mode with a closed stdout"
  (./train_gpt "${words[@]}" || [ $? -eq $((128 + 13)) ]) | true || fail "$mode whose reader has gone"  # SIGPIPE
done
./train_gpt --print-schedule --json --pp 4 --schedule zb-h1 >"$dir/zb-h1.json"
./train_gpt --print-schedule --json --pp 2 --schedule interleaved --micro-batches 3 >"$dir/interleaved.json"
plot() { "$python" scripts/plot_schedule.py "$@"; }
if ! python=$(scripts/find_python.sh matplotlib); then
  echo 'schedule_test: ok, but nothing was plotted: matplotlib is missing'
  exit
fi
[ "$(plot "$dir/zb-h1.json")" = "plot: $dir/zb-h1.png, 96 passes" ] || fail "not 4 x 8 x 3 passes were plotted"
[ "$(plot "$dir/zb-h1.json" "$dir/interleaved.json" -o "$dir/both.png")" = "plot: $dir/both.png, 120 passes" ] ||
  fail "not 96 and 2 x 2 x 3 x 2 passes were plotted"
./train_gpt --plan --machine h100x8 --model gpt2:124M --dtype bf16 --ranks 4 --pp 2 --schedule gpipe --batch-size 4 \
  --seq-len 256 --total-batch-size 8192 --trace "$dir/plan.json" >"$dir/plan.txt"
[ "$(plot "$dir/plan.json")" = "plot: $dir/plan.png, 16 passes" ] || fail "not 2 x 4 x 2 passes of a trace were plotted"
for png in zb-h1 both plan; do
  [ "$(head -c 4 "$dir/$png.png" | tail -c 3)" = PNG ] || fail "$png.png is no PNG"
done
echo '{"schedule": "zb-h1"}' >"$dir/part.json"
echo 'zb-h1' >"$dir/text.json"
refuses 'no "stages"; expected what ./train_gpt --print-schedule --json prints' plot "$dir/part.json"
refuses 'not JSON; expected what' plot "$dir/text.json"
refuses 'cannot read' plot "$dir/none.json"
echo '{"traceEvents": [], "otherData": {}}' >"$dir/empty.json"
refuses 'not a trace of ./train_gpt --trace' plot "$dir/empty.json"
refuses 'different units of time' plot "$dir/plan.json" "$dir/zb-h1.json" -o "$dir/mixed.png"
refuses 'name the output with -o' plot "$dir/zb-h1.json" "$dir/interleaved.json"
echo 'schedule_test: ok'
