#!/usr/bin/env bash
# GPT-3 125M on 300 billion tokens of FineWeb-Edu, as many as in Brown et al. 2020; see run_gpt2_124M.sh.
#
#   data/prepare.py fineweb-edu --config sample-350BT --tokens 300e9 --out data/fineweb-edu-350BT/fineweb-edu
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

exec ./train_gpt \
  --train-data 'data/fineweb-edu-350BT/fineweb-edu_train_*.bin' \
  --val-data 'data/fineweb-edu-350BT/fineweb-edu_val_*.bin' \
  --model gpt3:125M --seq-len 2048 --batch-size 32 --total-batch-size 524288 \
  --dtype bf16 --max-steps 572205 --lr 6e-4 --warmup-steps 700 --lr-schedule cosine --final-lr-frac 0.1 \
  --weight-decay 0.1 --grad-clip 1 --val-every 250 --val-steps 20 --checkpoint-every 5000 \
  --out-dir "${OUT:-out/gpt3_125M}" "$@"
