#!/usr/bin/env bash
# The first run: a small Llama-style model learns the King James Bible byte by byte, on any CPU, in about a minute, and
# is then plotted. `make run` calls this; arguments are passed to the trainer (the last one wins). A GPT-2-style model
# takes twice the time for the same loss: dev/LOG.md.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

OUT=${OUT:-out/kjv}
for word in "$@"; do
  case ${previous-} in --out-dir | -o) OUT=$word ;; esac
  [[ $word != --out-dir=* ]] || OUT=${word#*=}
  previous=$word
done
# Only a run that trains is plotted, not --plan.
written() { stat -c %y "$OUT/metrics.jsonl" 2>/dev/null || :; }
before=$(written)

# A signal goes on to the trainer, which saves the run; that Ctrl-C reaches it twice does no harm.
trainer='' signal=''
pass_on() { # SIGNAL
  signal=$1 again=yes
  [ -z "$trainer" ] || kill -s "$1" "$trainer" 2>/dev/null || :
}
trap 'pass_on TERM' INT TERM HUP
trap 'pass_on USR1' USR1 USR2
./train_gpt \
  --train-data 'data/kjv/kjv_train_*.bin' --val-data 'data/kjv/kjv_val_*.bin' \
  --model smollm2:135M --n-layer 4 --n-head 4 --n-kv-head 2 --n-embd 128 --n-ffn 256 --vocab-size 257 \
  --seq-len 128 --batch-size 16 --local-ranks 1 --dtype bf16 --max-steps 720 \
  --lr 4e-3 --warmup-steps 100 --lr-schedule cosine --final-lr-frac 0.05 --weight-decay 0.1 \
  --log-every 10 --val-every 120 --val-steps 20 --sample-every 360 --sample-tokens 120 --top-p 0.9 \
  --out-dir "$OUT" "$@" &
trainer=$! again=yes
[ -z "$signal" ] || { sleep 1; pass_on "$signal"; }   # it came before the trainer could take it
while [ -n "$again" ]; do   # a signal ends `wait` early
  again='' status=0
  wait "$trainer" || status=$?
done
[ "$status" = 0 ] || exit "$status"

[ "$(written)" = "$before" ] || "${PYTHON:-python3}" scripts/plot.py "$OUT"
