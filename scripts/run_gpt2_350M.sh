#!/usr/bin/env bash
# GPT-2 350M on 30 billion tokens of FineWeb-Edu; see run_gpt2_124M.sh.
#
#   data/prepare.py fineweb-edu --config sample-100BT --tokens 30e9 --out data/fineweb-edu-100BT/fineweb-edu
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

exec ./train_gpt \
  --train-data 'data/fineweb-edu-100BT/fineweb-edu_train_*.bin' \
  --val-data 'data/fineweb-edu-100BT/fineweb-edu_val_*.bin' \
  --model gpt2:350M --seq-len 1024 --batch-size 32 --total-batch-size 524288 \
  --dtype bf16 --max-steps 57220 --lr 3e-4 --warmup-steps 700 --lr-schedule cosine --final-lr-frac 0.1 \
  --weight-decay 0.1 --grad-clip 1 --val-every 250 --val-steps 20 --checkpoint-every 5000 \
  --out-dir "${OUT:-out/gpt2_350M}" "$@"
