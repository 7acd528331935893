#!/usr/bin/env bash
# No rank waits for a dead one (contract 17): one process of a job is killed or stopped, at start-up, in a step, in
# validation or while saving. All others end soon, with status 3, and name it; every checkpoint is
# complete, and the run resumes from it to the end of an undisturbed run; nothing is left running.
#
#   test/scripts/dead_ranks_test.sh [COUNT]     COUNT random cases, which SEED=N repeats; default: 40 in `make test-long`
#                                               (LONG in the environment), otherwise a few that are always the same
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
count=${1:-${LONG:+40}}
SEED=${SEED:-$RANDOM}
RANDOM=$SEED
dir=$(mktemp -d)
# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
# This test's own trainers, even after mpirun has ended and left them: the directory is its own.
mine() { trainers_with --out-dir "$dir/run"; }
cleanup() {
  # shellcheck disable=SC2046
  kill_all KILL $(mine) $(jobs -p)
  wait 2>/dev/null || :
  rm -rf "$dir"
}
trap cleanup EXIT
fail() {
  echo "dead_ranks_test: $*; the case: ${case-none}; SEED=$SEED" >&2
  tail -n 5 "$dir"/log.* >&2
  exit 1
}
forms=(tcp tcp-threads)
if grep -q 'MPI [0-9]' <<<"$(./train_gpt --version)" && grep -q '^MPIRUN_VERSION := .' build/config.mk; then
  forms+=(mpi mpi-threads)
fi
export OMPI_MCA_odls_base_sigkill_timeout=1 PRTE_MCA_odls_base_sigkill_timeout=1
unset TRAIN_GPT_TOKEN TRAIN_GPT_TOKEN_FILE

data=test/golden/gpt2_tiny/train.bin
common=(--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --lr 1e-2 --threads 1
  --device cpu --train-data "$data" --val-data "$data")
# Options with which four ranks spend most of their time there. Such a run lasts some seconds, even on a fast machine.
of_moment() {
  case $1 in
    start | step) echo --total-batch-size 1056 --max-steps 300 --val-every 0 --checkpoint-every 50 ;;
    validation) echo --total-batch-size 264 --max-steps 40 --val-every 2 --val-steps 300 --checkpoint-every 4 ;;
    saving) echo --total-batch-size 264 --max-steps 60 --val-every 0 --checkpoint-every 1 ;;
  esac
}
# How they divide the work: a ZeRO stage, or pipeline stages, each of which has a part of the checkpoint.
layout() {
  if [ "$1" = pp ]; then echo --pp 4 --n-layer 5
  else echo --zero-stage "$1"; fi
}
milliseconds() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
now() { date +%s%3N; }
# whole OUT ARGUMENTS...: the run as threads of one process, which is bitwise equal (processes_test.sh)
whole() { ./train_gpt "${common[@]}" --local-ranks 4 --out-dir "$1" "${@:2}" >"$dir/log.whole" 2>&1; }

# process_of_job NUMBER: its id
process_of_job() {
  local id
  for id in $(mine); do
    if grep -zqxs -e "OMPI_COMM_WORLD_RANK=$1" -e "PMI_RANK=$1" "/proc/$id/environ"; then
      echo "$id"
      return
    fi
  done
}

slowest=0
# case FORM SIGNAL MOMENT VICTIM LAYOUT
run_case() {
  local form=$1 signal=$2 moment=$3 victim=$4 layout=$5 processes=4 local_ranks=1
  case="$*"
  case $form in *-threads) processes=2 local_ranks=2 ;; esac
  victim=$((victim % processes))
  local out=$dir/run expected options process id status begun took pids=()
  expected=$dir/whole-$layout-${moment/start/step}
  # shellcheck disable=SC2207
  options=($(of_moment "$moment") $(layout "$layout"))
  [ -d "$expected" ] || whole "$expected" "${options[@]}" || fail "the run that nobody disturbs failed"
  rm -rf "$out" "$dir"/log.*
  options+=("${common[@]}" --local-ranks "$local_ranks" --out-dir "$out" --comm-timeout "$comm" --init-timeout "$init")

  case $form in
    tcp*)
      for ((process = 0; process < processes; ++process)); do
        ./train_gpt "${options[@]}" --rank $process --world-size $processes --rendezvous "file:$dir/meet" \
          >"$dir/log.$process" 2>&1 &
        pids+=($!)
      done ;;
    mpi*) scripts/multi_node/local_mpirun.sh -n $processes ./train_gpt "${options[@]}" >"$dir/log.mpi" 2>&1 &
      pids=($!) ;;
  esac
  if [ "$moment" = start ]; then
    sleep "$(milliseconds $((RANDOM % 700)))"
  else
    for ((tries = 0; tries < 1000; ++tries)); do
      if grep -qs '"step":3,' "$out/metrics.jsonl"; then break; fi
      sleep 0.01
    done
    sleep "$(milliseconds $((RANDOM % 300)))"
  fi
  case $form in
    tcp*) id=${pids[victim]} ;;
    mpi*) for ((tries = 0; tries < 100; ++tries)); do
        id=$(process_of_job "$victim")
        [ -z "$id" ] || break
        sleep 0.02
      done ;;
  esac
  begun=$(now)
  [ -n "$id" ] || fail "process $victim was not found"
  kill -s "$signal" "$id" 2>/dev/null || fail "it had ended already"

  [ "$signal" != KILL ] || wait "$id" 2>/dev/null || :
  for process in "${!pids[@]}"; do
    [ "${pids[process]}" != "$id" ] || continue
    status=0
    while kill -0 "${pids[process]}" 2>/dev/null && [ $(($(now) - begun)) -lt $(((init + 11) * 1000)) ]; do sleep 0.02; done
    took=$(($(now) - begun))
    # Open MPI 4.1.4's mpirun may hang after a process was killed while it was connecting to mpirun.
    if [[ $form = mpi* && $moment = start && -z $(mine) ]] && kill -0 "${pids[process]}" 2>/dev/null; then
      echo "  $case: mpirun hangs; all processes it had started have ended"
      kill -KILL "${pids[process]}"
      wait "${pids[process]}" 2>/dev/null || :
      return
    fi
    ! kill -0 "${pids[process]}" 2>/dev/null || fail "process $process still runs after $took ms"
    wait "${pids[process]}" || status=$?
    # 3: a rank was lost. mpirun ends with the status of a process that was killed.
    [ $status -eq 3 ] || [[ $form = mpi* && $status -ne 0 ]] || fail "process $process ended with status $status"
  done
  local limit=$((init > comm ? init : comm))
  [ "$moment" = start ] || limit=$comm
  [ $took -le $(((limit + 10) * 1000)) ] || fail "the others ended only after $took ms"
  [ $took -le $slowest ] || slowest=$took
  kill -KILL "$id" 2>/dev/null || :
  wait "$id" 2>/dev/null || :
  case $form in
    tcp*) named_in_logs ;;
    mpi*) for ((tries = 0; tries < 200; ++tries)); do
        [ -n "$(mine)" ] || break
        sleep 0.02
      done ;;
  esac
  [ -z "$(mine)" ] || fail "left running: $(for id in $(mine); do tr '\0' ' ' <"/proc/$id/cmdline"; done)"
  echo "  $case: $took ms: $(sed -n 's/^train_gpt: //p' "$dir"/log.[0-9m]* | sort | uniq -c | sort -rn | sed -n 1p)"

  # The checkpoints are those of the undisturbed run, and lead to its end.
  local checkpoint file
  for checkpoint in "$out"/step-*; do
    [ -d "$checkpoint" ] || continue
    for file in "$expected/${checkpoint##*/}"/*.safetensors; do
      cmp -s "$file" "$checkpoint/${file##*/}" || fail "${file#"$expected/"} is not that of the undisturbed run"
    done
  done
  # shellcheck disable=SC2046
  whole "$out" $(of_moment "$moment") $(layout "$layout") || fail "the run does not resume: $(cat "$dir/log.whole")"
  diff -rq -x .lock -x trainer.json -x manifest.json "$(last_of "$expected")" "$(last_of "$out")" >"$dir/log.diff" ||
    fail "the resumed run differs"
}
last_of() { printf '%s\n' "$1"/step-* | tail -n 1; }
# All survivors name the victim; once the run has begun, in the same words.
named_in_logs() {
  local process names="process $victim" rank lines
  for ((rank = victim * local_ranks; rank < (victim + 1) * local_ranks; ++rank)); do names+="|rank $rank"; done
  for ((process = 0; process < processes; ++process)); do
    [ $process -ne "$victim" ] || continue
    if [ "$moment" = start ]; then grep -qE "^train_gpt: .*($names)\b" "$dir/log.$process"
    else grep -qE "^train_gpt: ($names) on [^ ]+ has (gone|not arrived|not finished|said nothing)" "$dir/log.$process"
    fi || start_of_0 "$process" || fail "process $process does not name $names"
  done
  lines=$(cat "$dir"/log.[0-9] | grep '^train_gpt: ' | sort -u | wc -l)
  [ "$moment" = start ] || [ "$lines" -eq 1 ] || fail "not the same line everywhere"
}
# Until all have met, process 0 is the meeting point.
start_of_0() {
  [ "$moment" = start ] && [ "$victim" -eq 0 ] && grep -q '^train_gpt: the rendezvous at .* has' "$dir/log.$1"
}

if [ -z "$count" ]; then
  comm=3 init=20   # init is not waited for once the run has begun
  run_case tcp KILL saving 1 2
  run_case tcp-threads STOP step 0 2
  run_case tcp KILL saving 2 pp
  run_case "${forms[-1]}" STOP step 1 2
else
  comm=3 init=5
  moments=(start step validation saving) signals=(KILL STOP) layouts=(0 1 2 3 pp)
  for ((i = 0; i < count; ++i)); do
    run_case "${forms[i % ${#forms[@]}]}" "${signals[RANDOM % 2]}" "${moments[RANDOM % 4]}" $((RANDOM % 4)) \
      "${layouts[RANDOM % 5]}"
  done
fi
echo "dead_ranks_test: ok, the last survivor of all cases ended after $slowest ms"
