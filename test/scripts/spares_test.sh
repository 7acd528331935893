#!/usr/bin/env bash
# Spares that wait at the rendezvous: one takes the place of a process that was killed, and the run ends with the weights
# of the run that lost nobody; another one is killed while it waits, and one is not needed.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
# shellcheck disable=SC2046
trap 'kill_all KILL $(jobs -p); rm -rf "$dir"' EXIT
fail() {
  echo "spares_test: $1" >&2
  tail -n 20 "$dir"/log.* >&2
  exit 1
}
unset TRAIN_GPT_TOKEN TRAIN_GPT_TOKEN_FILE
run=(./train_gpt --model d1 --n-layer 2 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --lr 1e-2
  --threads 1 --device cpu --train-data test/golden/gpt2_tiny/train.bin --max-steps 3000 --checkpoint-every 50)
"${run[@]}" --local-ranks 2 --out-dir "$dir/whole" >"$dir/log.whole" 2>&1 || fail "the run that loses nobody"

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
job=("${run[@]}" --world-size 2 --rendezvous "127.0.0.1:$port" --out-dir "$dir/run" --spare-wait 3 --init-timeout 60)
refuses() { # PART ARGUMENTS...
  ! "${run[@]}" --out-dir "$dir/no" "${@:2}" >"$dir/log.no" 2>&1 || fail "${*:2} is not refused"
  grep -qF -e "$1" "$dir/log.no" || fail "${*:2}: not refused as expected"
}
refuses '--spare needs --world-size and --rendezvous' --spare --rendezvous "127.0.0.1:$port"
OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 refuses 'start processes and spares by --rank' \
  --spare --world-size 2 --rendezvous "127.0.0.1:$port"

pids=()
for name in a b c; do
  "${job[@]}" --spare >"$dir/log.$name" 2>&1 &
  pids+=($!)
done
# On this machine alone, run_tcp.sh needs no token; elsewhere it does, and a restart would not change that.
by_tcp=("${run[@]:1}" --out-dir "$dir/run" --spare-wait 3 --init-timeout 60)
! HOME=$dir timeout 60 scripts/supervise.sh -- scripts/multi_node/run_tcp.sh 0 2 "node1:$port" "${by_tcp[@]}" \
  >"$dir/log.no" 2>&1 || fail "run_tcp.sh needs no token"
grep -q 'not restarted: run_tcp.sh: there is no token' "$dir/log.no" || fail "run_tcp.sh does not say that it needs a token"
HOME=$dir timeout 120 scripts/supervise.sh --delay 0 -- scripts/multi_node/run_tcp.sh 0 2 "127.0.0.1:$port" \
  "${by_tcp[@]}" >"$dir/log.0" 2>&1 &
supervised=$!
"${job[@]}" --rank 1 >"$dir/log.1" 2>&1 &
lost=$!
waits() { grep -qs 'waits as a spare at' "$dir/log.$1"; }
until waits a && waits b && waits c && grep -qs 'is read, and intact' "$dir/log.a"; do
  kill -0 $supervised || fail "the job has ended"
  sleep 0.02
done
kill -KILL "${pids[2]}"
until grep -qs 'the spare on .* has gone' "$dir/log.0"; do sleep 0.02; done
kill -KILL $lost
wait $supervised || fail "the job did not go on with a spare"
for i in 0 1; do wait "${pids[i]}" || fail "a spare ended with an error"; done
[ "$(cat "$dir"/log.[ab] | grep -c 'takes the place of rank 1')" = 1 ] || fail "not one spare has taken the place"
[ "$(cat "$dir"/log.[ab] | grep -c 'the job has ended: not needed')" = 1 ] || fail "not one spare was left over"
grep -q 'resuming after step' "$dir/log.0" || fail "the run began anew"
for file in "$dir"/whole/step-003000/*.safetensors; do
  cmp -s "$file" "$dir/run/step-003000/${file##*/}" || fail "${file##*/} differs from that of the run that lost nobody"
done
echo "spares_test: ok"
