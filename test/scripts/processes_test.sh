#!/usr/bin/env bash
# Runs of several processes, started by mpirun, over TCP and both, are bitwise equal to the run with as many threads:
# losses, norms, weights, optimizer state. Processes that do not belong together are rejected, all of them, at once. A
# run that one process was asked to stop is saved, and goes on in another form.
#
#   test/scripts/processes_test.sh [all]     all, as in `make test-long`: every stage, dtype and form, and the whole
#                                            self-test; takes minutes
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
all=${1:-${LONG:+all}}
dir=$(mktemp -d)
# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
cleanup() {
  # shellcheck disable=SC2046
  kill_all KILL $(jobs -p)
  rm -rf "$dir"
}
trap cleanup EXIT
fail() {
  echo "processes_test: $*" >&2
  grep -h '^train_gpt: ' "$dir"/log.* >&2 || :
  tail -n 30 "$dir"/log.* >&2
  exit 1
}
has_mpi=
if grep -q 'MPI [0-9]' <<<"$(./train_gpt --version)" && grep -q '^MPIRUN_VERSION := .' build/config.mk; then has_mpi=yes; fi
export OMPI_MCA_odls_base_sigkill_timeout=0
unset TRAIN_GPT_TOKEN TRAIN_GPT_TOKEN_FILE

data=test/golden/gpt2_tiny/train.bin
run=(--model d1 --n-layer 2 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --lr 1e-2 --threads 1
  --device cpu --train-data "$data" --val-data "$data" --val-steps 2 --val-every 4 --max-steps 8 --checkpoint-every 4)

# mpi PROCESSES ARGUMENTS...: one process has a token of its own, as if the environment of its host had it
mpi() {
  # shellcheck disable=SC2016
  timeout "${limit:-120}" scripts/multi_node/local_mpirun.sh -n "$1" bash -c '
    [ "${OMPI_COMM_WORLD_RANK-$PMI_RANK}" != 1 ] || export TRAIN_GPT_TOKEN=a-token-of-one-host-alone
    exec ./train_gpt "$@"' mpi "${@:2}" >"$dir/log.mpi" 2>&1
}
# tcp PROCESSES ARGUMENTS...: the exit status is the last one that is not 0; all are in `statuses`
tcp() {
  local process status=0 pids=()
  statuses=()
  rm -f "$dir"/log.[0-9]*
  for ((process = 0; process < $1; ++process)); do
    timeout "${limit:-120}" ./train_gpt "${@:2}" --rank $process --world-size "$1" --rendezvous "file:$dir/meet" --init-timeout 60 \
      >"$dir/log.$process" 2>&1 &
    pids+=($!)
  done
  for process in "${pids[@]}"; do
    if wait "$process"; then statuses+=(0); else
      status=$?
      statuses+=("$status")
    fi
  done
  return $status
}
# results OUT: the results that must not depend on how the ranks were started
results() {
  (cd "$1/step-000008" && sha256sum -- *.safetensors)
  python3 - "$1/metrics.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    object = json.loads(line)
    if object["kind"] != "checkpoint": print(*(object.get(name) for name in ("kind", "step", "loss", "grad_norm", "lr")))
PY
}
# same FORM OPTIONS...: the run in this form equals that of four threads
same() {
  local form=$1 options=("${@:2}") out=$dir/$1 threads
  threads=$dir/threads-$(printf '%s' "${options[@]}")
  [ -d "$threads" ] ||
    ./train_gpt "${run[@]}" "${options[@]}" --local-ranks 4 --out-dir "$threads" >"$dir/log.threads" 2>&1 || fail "threads"
  rm -rf "$out"
  case $form in
    mpi) mpi 4 "${run[@]}" "${options[@]}" --out-dir "$out" ;;
    mpi-threads) mpi 2 "${run[@]}" "${options[@]}" --local-ranks 2 --out-dir "$out" ;;
    mpi-tcp) mpi 2 "${run[@]}" "${options[@]}" --local-ranks 2 --comm tcp --out-dir "$out" ;;
    tcp) tcp 4 "${run[@]}" "${options[@]}" --out-dir "$out" ;;
    tcp-threads) tcp 2 "${run[@]}" "${options[@]}" --local-ranks 2 --out-dir "$out" ;;
  esac || fail "$form: ${options[*]}"
  [ "$(results "$out")" = "$(results "$threads")" ] || fail "$form differs from threads: ${options[*]}"
}

forms=(tcp tcp-threads)
[ -z $has_mpi ] || forms+=(mpi mpi-threads mpi-tcp)
if [ "$all" = all ]; then
  for stage in 0 1 2 3; do
    for dtype in fp32 bf16; do
      for replicas in 1 2; do
        for form in "${forms[@]}"; do same "$form" --zero-stage $stage --dtype $dtype --dp-replicate $replicas; done
      done
    done
  done
  for sync in parameter-server parameter-server-chain partitioned-server; do
    for form in "${forms[@]}"; do same "$form" --dp-sync $sync; done
  done
  for attention in ring all-gather ulysses; do
    for form in "${forms[@]}"; do
      same "$form" --seq-len 32 --cp 4 --n-head 4 --cp-attention $attention --zero-stage 1
      same "$form" --seq-len 32 --cp 2 --tp 2 --n-head 4 --cp-attention $attention --dtype bf16
    done
  done
  for schedule in gpipe 1f1b interleaved; do
    for form in "${forms[@]}"; do
      same "$form" --pp 2 --schedule $schedule --n-layer 5 --zero-stage 3 --total-batch-size 528
      same "$form" --pp 2 --schedule $schedule --n-layer 5 --tp 2 --dtype bf16 --total-batch-size 264
    done
  done
  for form in "${forms[@]}"; do
    same "$form" --pp 4 --n-layer 6 --total-batch-size 528 --dtype bf16
    same "$form" --pp 2 --n-layer 3 --token-slices 3 --total-batch-size 264
    same "$form" --pp 4 --n-layer 5 --schedule pipedream --model llama3:8B --n-kv-head 1 --n-ffn 24
  done
  limit=900 tcp 2 --selftest --selftest-layouts all --local-ranks 2 --device cpu || fail "--selftest over TCP"
  [ -z $has_mpi ] || limit=900 mpi 4 --selftest --selftest-layouts all --device cpu || fail "--selftest under mpirun"
  limit=300 tcp 2 --selftest --selftest-draws 3000 --selftest-minutes 2 --local-ranks 2 --device cpu ||
    fail "--selftest-minutes over TCP"
else
  limit=300 tcp 2 --selftest --selftest-draws 3000-3011 --local-ranks 2 --device cpu || fail "--selftest-draws over TCP"
  same tcp --zero-stage 3 --dtype bf16
  same tcp-threads --zero-stage 1 --dp-replicate 2
  same tcp --seq-len 32 --cp 2 --tp 2
  same tcp-threads --pp 4 --n-layer 5 --total-batch-size 264
  if [ -n "$has_mpi" ]; then
    same mpi --zero-stage 3 --dtype bf16
    same mpi-threads --zero-stage 1 --dp-replicate 2
    same mpi --seq-len 32 --cp 2 --zero-stage 3 --cp-attention ulysses
    same mpi --pp 2 --schedule interleaved --n-layer 5 --zero-stage 2 --total-batch-size 528
  fi
fi

# refused WORDS PROCESSES OPTIONS...: process I begins with the words of `before[I]` and also gets those of `own[I]`;
# all are rejected within seconds, each with these words, or with `said=once` once per host, as errors common to all are.
# Their status is 1, or as the expression `ends_with` says: 3 where a process has not come.
trainer=$PWD/train_gpt
refused() {
  local words=$1 processes=$2 process status begin pids=()
  begin=$(date +%s%3N)
  rm -f "$dir"/log.[0-9]*
  for ((process = 0; process < processes; ++process)); do
    # shellcheck disable=SC2086
    env ${before[process]-} timeout 60 "$trainer" "${run[@]}" --out-dir "$dir/refused" --rank $process \
      --world-size "$processes" --rendezvous "file:$dir/meet" "${@:3}" ${own[process]-} >"$dir/log.$process" 2>&1 &
    pids+=($!)
  done
  for process in "${!pids[@]}"; do
    status=0
    wait "${pids[process]}" || status=$?
    [[ $status =~ ^${ends_with-1}$ ]] || fail "process $process ended with $status, expected: $words"
    [ "$said" = once ] || grep -qF -e "$words" "$dir/log.$process" || fail "process $process, expected: $words"
  done
  # Not only when a time-out of ten minutes has passed.
  [ $(($(date +%s%3N) - begin)) -le 60000 ] || fail "refused only after $(($(date +%s%3N) - begin)) ms: $words"
  grep -qF -e "$words" "$dir"/log.[0-9]* || fail "expected: $words"
  [ ! -e "$dir/refused/metrics.jsonl" ] || fail "something was written: $words"
  rm -rf "$dir/refused"
}
before=() said=by-each own=([1]='--lr 2e-2')
refused '--lr differs: 0.01 on rank 0, 0.02 on rank 1' 2
own=([2]='--world-size 4')
refused '--world-size differs: 3 on ranks 0 and 1, 4 on rank 2' 3
own=([2]='--rank 1')
refused 'two processes say that they are rank 1' 3
own=([1]='--lr no-number')
refused "rank 1 on $(uname -n): --lr 'no-number': expected a number" 2
own=() before=([0]='TRAIN_GPT_TOKEN=sixteen-characters-at-least' [1]='TRAIN_GPT_TOKEN=sixteen-characters-at-most')
ends_with='[13]' refused 'its token differs' 2 --init-timeout 5
own=() before=()
ends_with=3 refused 'ranks 1 and 2 have not arrived' 1 --world-size 3 --init-timeout 1
own=([1]='--train-data /nowhere.bin')
refused '--train-data differs' 2
own=() said=once
refused '--comm mpi: MPI has not started these processes' 2 --comm mpi
# Each host has other files under the same names.
for host in 0 1; do
  mkdir -p "$dir/host$host/model"
  cp "$data" "$dir/host$host/train.bin"
  cp test/golden/gpt2_tiny/{config.json,model.safetensors} "$dir/host$host/model"
  before[host]="-C $dir/host$host"
done
for file in train.bin model/model.safetensors; do
  printf '\0' | dd of="$dir/host1/$file" bs=1 seek=$(($(stat -c %s "$dir/host1/$file") - 2)) conv=notrunc status=none
done
refused 'what --train-data holds differs: ' 2 --train-data train.bin --val-every 0 --val-data train.bin --model model \
  --n-layer 3 --n-embd 36 --n-head 3
grep -qE 'what --model holds differs: [0-9a-f]{16} on rank 0, [0-9a-f]{16} on rank 1$' "$dir/log.0" ||
  fail "the two models were taken for one"
before=()

# A token that only rank 1 reads and that no model has: all save, all end with status 1, and rank 0 reports it for all.
cp "$data" "$dir/bad.bin"
printf '\377\377' | dd of="$dir/bad.bin" bs=1 seek=$((1024 + 2 * (2 * 33 + 5))) conv=notrunc status=none
! tcp 2 "${run[@]}" --train-data "$dir/bad.bin" --no-shuffle --val-every 0 --out-dir "$dir/bad" ||
  fail "a bad token is no error"
[ "${statuses[*]}" = '1 1' ] || fail "after a bad token the processes end with ${statuses[*]}"
lines=$(grep -h '^train_gpt: rank' "$dir"/log.[01])
[[ $(wc -l <<<"$lines") = 1 && $lines = "train_gpt: rank 1 on $(uname -n): "*': token 65535 at position 71 '* ]] ||
  fail "not one line that names rank 1 and its token: $lines"

# A signal to one process stops all; the run goes on with other processes and ends as if nothing had happened.
long=("${run[@]}" --max-steps 400 --val-every 0 --checkpoint-every 0)
./train_gpt "${long[@]}" --local-ranks 4 --out-dir "$dir/whole" >"$dir/log.whole" 2>&1 || fail "400 steps of threads"
(
  until grep -qs '"step":20,' "$dir/stopped/metrics.jsonl"; do sleep 0.02; done
  kill -TERM "$(trainers_with --out-dir "$dir/stopped" --rank 2)"
) &
status=0
tcp 4 "${long[@]}" --out-dir "$dir/stopped" || status=$?
[ $status -eq 75 ] || fail "stopped by a signal: exit status $status, expected 75"
grep -q 'stopped by SIGTERM.*saved to' "$dir/log.0" || fail "no word of the signal"
if [ -n "$has_mpi" ]; then mpi 2 "${long[@]}" --local-ranks 2 --out-dir "$dir/stopped"
else tcp 2 "${long[@]}" --local-ranks 2 --out-dir "$dir/stopped"; fi || fail "resumed"
for file in "$dir"/whole/step-000400/*.safetensors; do
  cmp -s "$file" "$dir/stopped/step-000400/${file##*/}" || fail "${file##*/} differs after a stop"
done

# So it does from any rank, whatever the layout. The losses come from the first rank of a tensor-parallel group, or from
# the last stage: the signal does not.
for layout in '--tp 2' '--pp 2' '--zero-stage 3' '--dp-sync parameter-server'; do
  for rank in 0 1; do
    rm -rf "$dir/stopped"
    (
      until grep -qs '"step":9,' "$dir/stopped/metrics.jsonl"; do sleep 0.02; done
      kill -TERM "$(trainers_with --out-dir "$dir/stopped" --rank $rank)"
    ) &
    # shellcheck disable=SC2086    # options
    ! tcp 2 "${long[@]}" --max-steps 100000 $layout --out-dir "$dir/stopped" || fail "$layout: not stopped"
    if [ "${statuses[*]}" != '75 75' ] || ! grep -q 'stopped by SIGTERM.*saved to' "$dir/log.0"; then
      fail "$layout, a signal to rank $rank: statuses ${statuses[*]}"
    fi
  done
done

# Strangers at the rendezvous, with garbage and with recordings, while a run trains: refused, and nothing changes.
count=40
[ "$all" != all ] || count=500
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export TRAIN_GPT_TOKEN=a-token-that-only-the-job-knows
endless=("${long[@]}" --local-ranks 2 --max-steps 100000 --time-limit 2 --out-dir "$dir/visited")
pids=()
for process in 0 1; do
  timeout 180 ./train_gpt "${endless[@]}" --rank $process --world-size 2 --rendezvous "127.0.0.1:$port" \
    >"$dir/log.$process" 2>&1 &
  pids+=($!)
done
for ((tries = 0; tries < 500; ++tries)); do
  if grep -qs '"step":20,' "$dir/visited/metrics.jsonl"; then break; fi
  sleep 0.02
done
python3 test/scripts/python/hostile_connections.py 127.0.0.1 "$port" --seed "$RANDOM" --count $count >"$dir/log.strangers" 2>&1 ||
  fail "strangers were believed, or kept waiting"
trainer=$(trainers_with --out-dir "$dir/visited" --rank 0)
[ "$(<"/proc/$trainer/comm")" = train_gpt ] || fail "top and ps call the trainer $(<"/proc/$trainer/comm")"
kill -USR1 "$trainer"
for process in "${pids[@]}"; do
  status=0
  wait "$process" || status=$?
  [ $status -eq 75 ] || fail "visited by strangers: status $status, expected 75"
done
unset TRAIN_GPT_TOKEN
last=$(sed -n 's/.*stopped by .* after step \([0-9]*\) .*/\1/p' "$dir/log.0")
grep '"kind":"train"' "$dir/visited/metrics.jsonl" | sed -n "1,${last}p" >"$dir/visited.jsonl"
./train_gpt "${long[@]}" --max-steps 100000 --local-ranks 4 --out-dir "$dir/unvisited" >"$dir/log.unvisited" 2>&1 &
until grep -qs "\"step\":$last," "$dir/unvisited/metrics.jsonl"; do sleep 0.1; done
kill -KILL $!
wait $! 2>/dev/null || :
python3 - "$dir/visited.jsonl" "$dir/unvisited/metrics.jsonl" <<'PY' || fail "strangers changed the losses"
import json, sys
visited, unvisited = ([(o["step"], o["loss"], o["grad_norm"]) for o in map(json.loads, open(path).read().rsplit("\n", 1)[0].splitlines())
                       if o["kind"] == "train"] for path in sys.argv[1:])
sys.exit(visited != unvisited[:len(visited)])
PY
echo "processes_test: ok${has_mpi:+, MPI too}"
