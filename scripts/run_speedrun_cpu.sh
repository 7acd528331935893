#!/usr/bin/env bash
# A small recipe for a CPU, in stages: a small Llama-style model on the King James Bible, short sequences first. Its time
# and loss: dev/results/board.md. Arguments are passed to the trainer; the last one wins.
#
#   data/prepare_kjv.sh
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

OUT=${OUT:-out/speedrun}
exec ./train_gpt \
  --train-data 'data/kjv/kjv_train_*.bin' --val-data 'data/kjv/kjv_val_*.bin' \
  --model smollm2:135M --n-layer 4 --n-head 4 --n-kv-head 2 --n-embd 160 --n-ffn 320 --vocab-size 257 \
  --local-ranks 1 --dtype bf16 --weight-decay 0.1 --log-every 20 --val-every 250 --val-steps 20 \
  --stages scripts/recipes/speedrun_cpu.toml --out-dir "$OUT" "$@"
