#!/usr/bin/env bash
# Tiny runs of every axis, as threads and as two processes, some with long steps, some saved by the clock, some branches
# of another run, some of mixed sources in many short stages, are killed at random moments, half of them within the first
# 0.2 seconds, some on a full disk, and started again until they are done. No start is refused, and in the end weights,
# optimizer state and metrics are bitwise those of an uninterrupted run. A run whose layout changes with every start has
# read the same samples: its losses are the same but for rounding.
#
#   test/scripts/long_kills_test.sh [KILLS [KIND...]]
#
# KILLS: default 300. KIND: default all. SEED=N repeats a test. Full disks need root, for a tmpfs.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
kills=${1:-300}
shift || true
only=("$@")
SEED=${SEED:-$RANDOM}
RANDOM=$SEED
dir=$(mktemp -d)
trap 'umount "$dir/disk" 2>/dev/null; rm -rf "$dir"' EXIT
mkdir "$dir/disk"
disk=
if mount -t tmpfs -o size=3m tmpfs "$dir/disk" 2>/dev/null; then disk=yes; fi
fail() {
  echo "long_kills_test: $1; SEED=$SEED test/scripts/long_kills_test.sh $kills ${only[*]} repeats it" >&2
  cat "$dir"/err* >&2
  ls -la "$out" >&2
  exit 1
}

# Sources of random tokens, and a recipe of eight stages with ramps, mixes and lengths, whose epochs end within them.
python3 - "$dir" <<'PY'
import random, struct, sys
random.seed(1)
for name, tokens in ("web", 6000), ("code", 2100), ("math", 900):
    with open(f"{sys.argv[1]}/{name}.bin", "wb") as shard:
        shard.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253))
        shard.write(struct.pack(f"<{tokens}H", *(random.randrange(211) for _ in range(tokens))))
with open(f"{sys.argv[1]}/recipe.toml", "w") as recipe:
    for stage in range(8):
        length = (32, 16, 64, 8)[stage % 4]
        recipe.write(f"""[[stage]]
steps = {20 + 3 * stage}
seq-len = {length}
batch-size = {64 // length}
batch-ramp = [[0, {128 * (1 + stage % 2)}], [2000, 256]]
data = {{ web = {1 + stage}, code = 2, math = {stage % 3} }}
lr-schedule = "{('linear', 'constant', '1-sqrt', 'cosine')[stage % 4]}"
""")
PY

# Command lines, without --out-dir. A run with long steps is often killed before it has done any.
tiny=(--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --lr 1e-2 --threads 1 --val-steps 2
  --train-data test/golden/gpt2_tiny/train.bin --val-data test/golden/gpt2_tiny/train.bin --keep-checkpoints 2 --keep-best)
# shellcheck disable=SC2034  # used by name
{
  one=("${tiny[@]}" --total-batch-size 264 --max-steps 300 --checkpoint-every 20 --val-every 40)
  sync=("${one[@]}" --checkpoint-mode sync)
  four=("${one[@]}" --local-ranks 4 --zero-stage 2)
  stages=("${one[@]}" --pp 4 --n-layer 5 --schedule gpipe)
  long=("${tiny[@]}" --total-batch-size 33000 --max-steps 6 --checkpoint-every 2 --val-every 3)
  sharded=("${one[@]}" --local-ranks 2 --zero-stage 3)
  tensor=("${one[@]}" --tp 2)
  context=("${one[@]}" --cp 2 --seq-len 32 --total-batch-size 256)
  experts=("${one[@]}" --model d1-e4 --ep 2 --local-ranks 2)
  zero_bubble=("${one[@]}" --pp 2 --n-layer 4 --schedule zb-v)
  interleaved=("${one[@]}" --pp 2 --n-layer 4 --schedule interleaved --pp-chunks 2)
  asynchronous=("${one[@]}" --model llama2:7B --pp 2 --n-layer 2 --n-ffn 32
    --schedule pipedream --total-batch-size 66)
  processes=("${one[@]}" --zero-stage 1 --init-timeout 8)
  clock=("${one[@]}" --local-ranks 2 --checkpoint-every 0 --checkpoint-minutes 0.001)
  long_clock=("${long[@]}" --checkpoint-every 0 --checkpoint-minutes 0.001)
  recipe=("${tiny[@]:0:10}" --threads 1 --val-steps 2 --val "code=$dir/code.bin" --val "math=$dir/math.bin" --keep-best
    --keep-checkpoints 2 --checkpoint-every 20 --val-every 40 --stages "$dir/recipe.toml" --data "web=$dir/web.bin:1"
    --data "code=$dir/code.bin:1" --data "math=$dir/math.bin:1" --total-batch-size 256)
  recipe_data=("${recipe[@]}" --local-ranks 2)
  recipe_tensor=("${recipe[@]}" --tp 2)
  recipe_context=("${recipe[@]}" --cp 2)
  recipe_stages=("${recipe[@]}" --pp 2 --n-layer 2)
  recipe_experts=("${recipe[@]}" --model d1-e4 --ep 2 --local-ranks 2)
  recipe_sharded=("${recipe[@]}" --local-ranks 2 --zero-stage 3)
  recipe_relaid=("${recipe[@]}")
  branch=("${one[@]}" --lr 5e-3 --branch-from "$dir/parent/step-000100")
  branch_of_two=("${branch[@]}" --init-timeout 8 --checkpoint-minutes 0.002)
}
kinds=(one sync four long stages sharded tensor context experts zero_bubble interleaved asynchronous processes clock long_clock
  branch branch_of_two recipe recipe_data recipe_tensor recipe_context recipe_stages recipe_experts recipe_sharded
  recipe_relaid)
if [ ${#only[@]} -gt 0 ]; then kinds=("${only[@]}"); fi
layouts=('' '--local-ranks 2' '--tp 2' '--cp 2' '--local-ranks 2 --zero-stage 3')   # of recipe_relaid, in turn
of_two_processes=(processes branch_of_two)
# run_it KIND OUT [LAYOUT]: in the background, as one process or two; `started` has their ids, "$dir"/out* and err* their outputs
run_it() {
  local -n options_of_kind=$1
  local process count=1 line
  started=()
  if [[ " ${of_two_processes[*]} " = *" $1 "* ]]; then count=2; fi
  rm -f "$dir"/out* "$dir"/err*
  for ((process = 0; process < count; ++process)); do
    line=("${options_of_kind[@]}" --out-dir "$2")
    # shellcheck disable=SC2206    # the words of a layout
    [ "$1" != recipe_relaid ] || line+=(${layouts[${3:-0} % ${#layouts[@]}]})
    [ $count = 1 ] || line+=(--rank "$process" --world-size "$count" --rendezvous "file:$dir/meet" --local-ranks 1)
    ./train_gpt "${line[@]}" >"$dir/out$process" 2>"$dir/err$process" &
    started+=($!)
  done
}
# Waits for all that were started; returns the largest of their statuses.
end_all() {
  local process status all=0
  for process in "${started[@]}"; do
    status=0
    wait "$process" 2>/dev/null || status=$?
    if [ $status != 0 ] && { [ $all = 0 ] || [ $status -gt $all ]; }; then all=$status; fi
  done
  return $all
}
# results OUT: the results that must not depend on interruptions
results() {
  (cd "$(printf '%s\n' "$1"/step-* | tail -n 1)" && basename "$PWD" && sha256sum -- *.safetensors)
  python3 - "$1/metrics.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    object = json.loads(line)
    if object["kind"] != "checkpoint": print(*(object.get(name) for name in ("kind", "step", "loss", "grad_norm", "lr")))
PY
}

# same_losses A B: two results whose lines of training and validation are the same but for rounding
same_losses() {
  python3 - "$@" <<'PY'
import sys
a, b = ([line.split() for line in open(name) if line.startswith(("train", "val"))] for name in sys.argv[1:])
if [line[:2] for line in a] != [line[:2] for line in b]: sys.exit("other steps")
for one, other in zip(a, b):
    if abs(float(one[2]) - float(other[2])) > 2e-3: sys.exit(f"{one} and {other}")
PY
}

out=$dir/parent
./train_gpt "${one[@]}" --max-steps 100 --out-dir "$out" >"$dir/out0" 2>"$dir/err0" || fail "the parent of branches failed"
for kind in "${kinds[@]}"; do
  out=$dir/whole-$kind
  run_it "$kind" "$out"
  end_all || fail "the run that nobody kills failed ($kind)"
  results "$out" >"$dir/whole-$kind.txt"
  rm -rf "$out"
done

milliseconds() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
# start PLACE KIND ATTEMPT: starts the run and kills it at a random moment, later with each attempt. 0: the run is done.
declare -A ended=([0]=0 [1]=0 [75]=0 [other]=0)
start() {
  local signals=(KILL TERM INT) signal status=0 process
  if [ "$2" = asynchronous ]; then signals=(KILL KILL KILL); fi   # who saves empties the pipeline, and then others are its sums
  signal=${signals[RANDOM % 3]}
  run_it "$2" "$1/run" "$3"
  process=${started[RANDOM % ${#started[@]}]}
  sleep "$(milliseconds $((RANDOM % 2 ? RANDOM % 200 : RANDOM % (900 + 100 * $3))))"
  kill -s "$signal" "$process" 2>/dev/null || true
  if [ $((RANDOM % 4)) = 0 ]; then   # it may be saving
    sleep "$(milliseconds $((RANDOM % 50)))"
    kill -s KILL "$process" 2>/dev/null || true
  fi
  end_all || status=$?
  case $status in
    0 | 1 | 75) ended[$status]=$((ended[$status] + 1)) ;;
    130 | 137 | 143) ended[other]=$((ended[other] + 1)) ;;   # SIGKILL, or before the handlers of signals are there
    *) fail "status $status after SIG$signal" ;;
  esac
  return $status
}

killed=0 runs=0 full=0
while [ $killed -lt "$kills" ]; do
  runs=$((runs + 1))
  kind=${kinds[runs % ${#kinds[@]}]} place=$dir/place
  if [ -n "$disk" ] && [ $((runs / ${#kinds[@]} % 2)) = 1 ]; then place=$dir/disk; fi
  mkdir -p "$place"
  out=$place/run
  for attempt in $(seq 200); do
    filled=
    if [ "$place" = "$dir/disk" ] && [ $((RANDOM % 3)) = 0 ]; then   # leaves room for a part of what will be written
      filled=yes full=$((full + 1))
      room=$(($(stat -f --format='%a * %S' "$place") - RANDOM % 200 * 1024))
      if [ $room -gt 0 ]; then head -c $room /dev/zero >"$place/filler"; fi
    fi
    status=0
    start "$place" "$kind" "$attempt" || status=$?
    rm -f "$place/filler"
    if [ $status = 0 ]; then break; fi
    if [ $status = 1 ]; then
      if [ -z "$filled" ]; then fail "a start was refused"; fi
      grep -q -e 'No space left' -e 'free' "$dir"/err* || fail "a start on a full disk failed with another reason"
    else
      killed=$((killed + 1))
    fi
    [ "$attempt" -lt 200 ] || fail "no end after 200 starts"
  done
  results "$out" >"$dir/now.txt"
  if [ "$kind" = recipe_relaid ]; then
    same_losses "$dir/whole-$kind.txt" "$dir/now.txt" || fail "a run in changing layouts has read other samples"
  else
    cmp -s "$dir/whole-$kind.txt" "$dir/now.txt" ||
      fail "a resumed run ($kind) differs: $(diff "$dir/whole-$kind.txt" "$dir/now.txt" | sed -n 1,6p)"
  fi
  rm -rf "$out"
done
echo "long_kills_test: $killed kills of $runs runs (SEED=$SEED): ${ended[75]} saved, ${ended[other]} died at once," \
  "$full starts on a full disk of which ${ended[1]} failed; all were resumed and are bitwise the runs that nobody killed"
[ -n "$disk" ] || echo "long_kills_test: full disks were left out: only root can mount a tmpfs"
