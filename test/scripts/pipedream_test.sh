#!/usr/bin/env bash
# Runs with --schedule pipedream: killed and resumed they are bitwise the run that nobody killed; stopped by a signal
# they record where they flushed, and are bitwise a run that flushed there; what it cannot do is refused by name.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "pipedream_test: $1" >&2
  exit 1
}
run=(./train_gpt --model llama2:7B --n-layer 5 --n-head 4 --n-kv-head 2 --n-embd 48 --n-ffn 60 --vocab-size 211
  --train-data test/golden/gpt2_tiny/train.bin --val-data test/golden/gpt2_tiny/train.bin --val-steps 1 --seq-len 33
  --lr 1e-2 --threads 1 --device cpu)
pipedream=("${run[@]}" --batch-size 8 --local-ranks 4 --pp 4 --schedule pipedream --max-steps 60 --val-every 0)
# train OUT OPTION...: "$dir/out" and "$dir/err" have what it printed
train() { "${pipedream[@]}" --out-dir "$dir/$1" "${@:2}" >"$dir/out" 2>"$dir/err"; }
flushes() { grep '"kind":"flush"' "$dir/$1/metrics.jsonl" | sed 's/.*"step":\([0-9]*\).*/\1/' | xargs; }
# results OUT: the last checkpoint, and the metrics of the updates without times
results() {
  (cd "$dir/$1/step-000060" && sha256sum -- *.safetensors)
  grep '"kind":"train"' "$dir/$1/metrics.jsonl" | sed 's/,"ms":.*//'
}
same() { [ "$(results "$1")" = "$(results "$2")" ] || fail "$1 is not $2: $(diff <(results "$1") <(results "$2"))"; }
# cut OUT SIGNAL OPTION...: the run gets a signal when more than half of its updates are reported; prints its exit status
cut() {
  local out=$1 signal=$2 process status=0
  "${pipedream[@]}" --out-dir "$dir/$out" "${@:3}" >"$dir/out" 2>"$dir/err" &
  process=$!
  until grep -qs '"step":3[1-9]' "$dir/$out/metrics.jsonl"; do
    kill -0 $process 2>/dev/null || fail "$out ended early: $(cat "$dir/err")"
  done
  kill -s "$signal" $process
  wait $process || status=$?
  echo "$status"
}

train whole --checkpoint-every 20 || fail "$(cat "$dir/err")"
grep -q 'pipedream with up to 4 versions of weights' "$dir/out" || fail 'the header does not say what pipedream keeps'
grep -q 'clip 1, stage by stage by its own norm' "$dir/out" || fail 'the header does not say how it clips'
[ "$(flushes whole)" = '20 40 60' ] || fail "flushed after $(flushes whole)"
train none || fail "$(cat "$dir/err")"
[ "$(flushes none)" = 60 ] || fail "flushed after $(flushes none)"
[ "$(results none)" != "$(results whole)" ] || fail 'flushes change nothing'

[ "$(cut killed KILL --checkpoint-every 20)" -gt 128 ] || fail 'not killed'
train killed --checkpoint-every 20 || fail "$(cat "$dir/err")"
[ "$(flushes killed)" = '20 40 60' ] || fail "killed, flushed after $(flushes killed)"
same killed whole

[ "$(cut stopped TERM)" -eq 75 ] || fail "not stopped: $(cat "$dir/err")"
train stopped || fail "$(cat "$dir/err")"
read -r first last <<<"$(flushes stopped)"
[[ $first -gt 30 && $first -lt 60 && $last = 60 ]] || fail "stopped, flushed after $(flushes stopped)"
train flushed --val-every "$first" || fail "$(cat "$dir/err")"
[ "$(flushes flushed)" = "$first 60" ] || fail "validated, flushed after $(flushes flushed)"
same stopped flushed

# On one stage it is 1f1b; a run that changes its schedule says so.
train one --local-ranks 1 --pp 1 --max-steps 60 || fail "$(cat "$dir/err")"
train one-1f1b --local-ranks 1 --pp 1 --schedule 1f1b || fail "$(cat "$dir/err")"
same one one-1f1b
train whole --schedule 1f1b --max-steps 61 || fail "$(cat "$dir/err")"
grep -q "notice: --schedule was 'pipedream' and is now '1f1b'" "$dir/out" || fail "a change of schedule: $(cat "$dir/out")"

# refuses TEXT OPTION...
refuses() {
  local text=$1 status=0
  shift
  train refused "$@" || status=$?
  [ $status -eq 1 ] || fail "$* exited with $status"
  [[ $(cat "$dir/err") == *"$text"* ]] || fail "$* was refused without '$text': $(cat "$dir/err")"
  [ ! -e "$dir/refused" ] || fail "$* made a directory"
}
with='with --schedule pipedream'
refuses "--total-batch-size 528 $with: a step is one micro-batch of each data-parallel rank, 8 x 33 x 1 = 264 tokens" \
  --total-batch-size 528
refuses "--zero-stage 1 $with" --zero-stage 1 --local-ranks 8
refuses "--dp-sync parameter-server" --dp-sync parameter-server
refuses "--grad-reduce micro $with" --grad-reduce micro
refuses "--skip-loss-z $with: outliers are told by the loss and the norm of the whole model" --skip-loss-z 3
refuses "--skip-grad-z $with" --skip-grad-z 3
refuses "--token-slices 2" --token-slices 2
refuses "--schedule pipedream with --model d5, whose embedding is also its head" --model d5 --n-head 4 --n-kv-head 4
echo 'pipedream_test: ok'
