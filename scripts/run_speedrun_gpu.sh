#!/usr/bin/env bash
# The recipe of run_speedrun_cpu.sh for one GPU: GPT-2's size on FineWeb-Edu, a batch ramp, then a better-trained tail:
# the last of the tokens at twice the length, while the rate falls to nothing. It has not been measured yet.
# Arguments are passed to the trainer; the last one wins.
#
#   data/prepare.py fineweb-edu
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

OUT=${OUT:-out/speedrun_gpu}
exec ./train_gpt \
  --train-data 'data/fineweb-edu/fineweb-edu_train_*.bin' --val-data 'data/fineweb-edu/fineweb-edu_val_*.bin' \
  --model llama3:1B --n-layer 12 --n-head 12 --n-kv-head 4 --n-embd 768 --n-ffn 2048 --vocab-size 50304 \
  --dtype bf16 --weight-decay 0.1 --log-every 20 --val-every 250 --val-steps 20 --checkpoint-every 1000 \
  --stages scripts/recipes/speedrun_gpu.toml --out-dir "$OUT" "$@"
