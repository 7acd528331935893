#!/usr/bin/env bash
# Trains models of several widths, or depths, with several learning rates, as many runs at a time as there are
# processors, and draws the last validation loss over the rate for each: with a parametrization that suits them, one
# rate is the best for all. The same command, repeated, goes on with what was interrupted.
#
#   WIDTHS='64 128 256' RATES='1e-3 2e-3 4e-3' scripts/sweep_lr.sh OUT --parametrization mup --base-width 64 \
#       --model smollm2:1.7B --n-layer 4 --vocab-size 257 --seq-len 128 --max-steps 200 \
#       --train-data 'data/kjv/kjv_train_*.bin' --val-data 'data/kjv/kjv_val_*.bin'
#
#   WIDTHS     channels; heads keep HEAD_SIZE of them (32), and key-value heads their share of the heads
#   DEPTHS     instead: layers; to try rates of one model, give its own number of layers
#   JOBS       runs at a time, each on one thread (the processors)
#
# Writes OUT/sweep.csv, with the loss nan for a run that diverged, and OUT/sweep.png if there is matplotlib. A run that
# fails has no row in OUT/sweep.csv; then there is no OUT/sweep.png, and the exit status is 1.
set -euo pipefail
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
case $* in -h | --help) usage; exit ;; esac
if [ $# -lt 2 ] || [ -z "${RATES:-}" ] || [ -z "${WIDTHS:-}${DEPTHS:-}" ] || [ -n "${WIDTHS:+${DEPTHS:-}}" ]; then
  usage >&2
  exit 1
fi
root=$(CDPATH='' cd "$(dirname "$0")/.." && pwd)
axis=${WIDTHS:+width}
axis=${axis:-depth}

# OUT --run OPTIONS... SIZE RATE, from below: one run.
if [ "$2" = --run ]; then
  size=${*: -2:1} rate=${*: -1} status=0
  out=$1/$axis-$size/lr-$rate
  shape=(--n-layer "$size")
  if [ "$axis" = width ]; then shape=(--n-embd "$size" --n-head "$((size / ${HEAD_SIZE:-32}))"); fi
  mkdir -p "$out"
  rm -f "$out/result"
  "$root/train_gpt" "${@:3:$#-4}" "${shape[@]}" --lr "$rate" --threads 1 --out-dir "$out/run" >"$out/log" 2>&1 ||
    status=$?
  case $status in
    0) loss=$(sed -n '/"kind":"val"/s/^[^{]*{[^{]*"loss":\([^,}]*\).*/\1/p' "$out/run/metrics.jsonl" | tail -n 1) ;;
    2) loss=nan ;;
    *)
      echo "sweep_lr.sh: $axis $size with rate $rate ended with status $status: see $out/log" >&2
      exit 1
      ;;
  esac
  if [ -z "$loss" ]; then
    echo "sweep_lr.sh: $out/run/metrics.jsonl has no validation: give --val-data" >&2
    exit 1
  fi
  echo "$size,$rate,$loss" | tee "$out/result"
  exit
fi

# A signal ends xargs and all runs; setsid: they are a process group.
stopped='' runs=''
trap 'stopped=yes; [ -z "$runs" ] || kill -s TERM -- "-$runs" 2>/dev/null || :' INT TERM HUP
mkdir -p "$1"
status=0
for size in ${WIDTHS:-$DEPTHS}; do
  for rate in $RATES; do printf '%s\0%s\0' "$size" "$rate"; done
done | setsid xargs -0 -n 2 -P "${JOBS:-$(nproc)}" "$root/scripts/sweep_lr.sh" "$1" --run "${@:2}" &
runs=$!
[ -z "$stopped" ] || kill -s TERM -- "-$runs" 2>/dev/null || :   # before they were known
wait "$runs" || status=1
while [ -n "$stopped" ] && kill -0 -- "-$runs" 2>/dev/null; do sleep 0.2; done   # trainers save
[ -z "$stopped" ] || { echo "sweep_lr.sh: stopped by a signal; the same command goes on" >&2; exit 143; }
{
  echo "$axis,lr,loss"
  for size in ${WIDTHS:-$DEPTHS}; do
    for rate in $RATES; do cat "$1/$axis-$size/lr-$rate/result" 2>/dev/null || :; done
  done
} >"$1/sweep.csv"
[ $status = 0 ] || exit $status
if python=$("$root/scripts/find_python.sh" matplotlib); then "$python" "$root/scripts/plot_sweep.py" "$1/sweep.csv"; fi
