#!/usr/bin/env bash
# A model of 21 million parameters on TinyStories (Eldan & Li 2023): coherent stories after some hours on a CPU, or
# minutes on a GPU. Arguments are passed to the trainer; the last one wins.
#
#   data/prepare.py tinystories
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

exec ./train_gpt \
  --train-data 'data/tinystories/tinystories_train_*.bin' --val-data 'data/tinystories/tinystories_val_*.bin' \
  --model d6 --n-embd 288 --vocab-size 50257 --seq-len 256 --batch-size 16 --total-batch-size 32768 \
  --dtype bf16 --max-steps 15000 --lr 1e-3 --warmup-steps 200 --lr-schedule cosine --final-lr-frac 0.1 \
  --weight-decay 0.1 --grad-clip 1 --val-every 250 --val-steps 10 --checkpoint-every 1000 \
  --tokenizer data/tinystories/gpt2_tokenizer.bin --sample-every 1000 --sample-tokens 200 --top-p 0.95 \
  --out-dir "${OUT:-out/tinystories}" "$@"
