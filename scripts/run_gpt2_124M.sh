#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens of FineWeb-Edu. Arguments are passed to the trainer; the last one wins: --batch-size
# 16 for a GPU with 24 GB, --plan to see what the run needs. The total batch of 524,288 tokens fits 1, 2, 4 or 8 GPUs
# with 64 sequences each. Learning rate and batch size: Brown et al. 2020, table 2.1.
#
#   data/prepare.py fineweb-edu --tokens 10e9
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

exec ./train_gpt \
  --train-data 'data/fineweb-edu/fineweb-edu_train_*.bin' --val-data 'data/fineweb-edu/fineweb-edu_val_*.bin' \
  --model gpt2:124M --seq-len 1024 --batch-size 64 --total-batch-size 524288 \
  --dtype bf16 --max-steps 18865 --lr 6e-4 --warmup-steps 700 --lr-schedule cosine --final-lr-frac 0.1 \
  --weight-decay 0.1 --grad-clip 1 --val-every 250 --val-steps 20 --checkpoint-every 5000 \
  --out-dir "${OUT:-out/gpt2_124M}" "$@"
