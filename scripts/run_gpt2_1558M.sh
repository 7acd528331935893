#!/usr/bin/env bash
# GPT-2 1558M on 34 billion tokens of FineWeb-Edu; see run_gpt2_124M.sh. The backward recomputes GELU, so that 16
# sequences fit into 80 GB.
#
#   data/prepare.py fineweb-edu --config sample-100BT --tokens 34e9 --out data/fineweb-edu-100BT/fineweb-edu
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

exec ./train_gpt \
  --train-data 'data/fineweb-edu-100BT/fineweb-edu_train_*.bin' \
  --val-data 'data/fineweb-edu-100BT/fineweb-edu_val_*.bin' \
  --model gpt2:1558M --seq-len 1024 --batch-size 16 --total-batch-size 1048576 \
  --dtype bf16 --recompute activation --max-steps 32000 --lr 2e-4 --warmup-steps 700 --lr-schedule cosine --final-lr-frac 0.1 \
  --weight-decay 0.1 --grad-clip 1 --val-every 250 --val-steps 20 --checkpoint-every 5000 \
  --out-dir "${OUT:-out/gpt2_1558M}" "$@"
