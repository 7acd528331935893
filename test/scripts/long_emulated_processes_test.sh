#!/usr/bin/env bash
# The trainer's GPU build on emulated GPUs, as several processes: from the launcher to NCCL's id, its communicators and
# the sums; and processes that share a GPU, whose tensors go through pinned memory. Bitwise equal to as many threads.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
make -s build/emulated/train_gpt
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
  echo "long_emulated_processes_test: $*" >&2
  tail -n 30 "$dir"/log.* >&2
  exit 1
}
unset TRAIN_GPT_TOKEN TRAIN_GPT_TOKEN_FILE
data=test/golden/gpt2_tiny/train.bin
run=(timeout 300 build/emulated/train_gpt --model d1 --n-layer 2 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33
  --batch-size 2 --lr 1e-2 --threads 1 --train-data "$data" --max-steps 4 --val-every 0 --device cuda)

# one_context_each PROCESSES CONTEXTS_OF_EACH: each process made contexts on as many GPUs as it has ranks, and no two
# processes on the same GPU, unless ranks share GPUs.
one_context_each() {
  [ "$(cut -d ' ' -f 1 "$dir/contexts" | sort | uniq -c | awk -v each="$2" '$1 == each' | wc -l)" -eq "$1" ] ||
    fail "$1 processes made these contexts (process, GPU), not $2 each: $(tr '\n' ',' <"$dir/contexts")"
}

# same GPUS TRANSPORT PROCESSES LOCAL_RANKS OPTIONS...
same() {
  export EMULATED_GPUS=$1
  local transport=$2 processes=$3 local_ranks=$4 process status=0 pids=() ranks=$(($3 * $4))
  shift 4
  rm -rf "$dir/threads" "$dir/processes" "$dir/contexts"
  "${run[@]}" "$@" --local-ranks $ranks --out-dir "$dir/threads" >"$dir/log.threads" 2>&1 || fail "threads: $*"
  for ((process = 0; process < processes; ++process)); do
    EMULATED_CONTEXTS=$dir/contexts "${run[@]}" "$@" --local-ranks "$local_ranks" --comm "${COMM:-auto}" --out-dir "$dir/processes" --rank $process --world-size "$processes" \
      --rendezvous "file:$dir/meet" >"$dir/log.$process" 2>&1 &
    pids+=($!)
  done
  for process in "${pids[@]}"; do wait "$process" || status=$?; done
  [ $status -eq 0 ] || fail "processes end with $status: $*"
  one_context_each "$processes" $((local_ranks < EMULATED_GPUS ? local_ranks : EMULATED_GPUS))
  grep -q "tensors go by $transport" "$dir/log.0" || fail "not by $transport: $*"
  for file in "$dir"/threads/step-000004/*.safetensors; do
    cmp -s "$file" "$dir/processes/step-000004/${file##*/}" || fail "${file##*/} differs: $transport, $*"
  done
}
same 2 NCCL 2 1
same 2 NCCL 2 1 --zero-stage 3 --dtype bf16
same 4 NCCL 2 2 --zero-stage 1 --dp-replicate 2
same 4 NCCL 4 1 --dp-sync partitioned-server
same 2 NCCL 2 1 --tp 2 --tp-overlap
same 4 NCCL 2 2 --tp 2 --tp-overlap --zero-stage 3 --dtype bf16
same 2 NCCL 2 1 --cp 2 --seq-len 32 --cp-attention ulysses
same 4 NCCL 2 2 --cp 4 --seq-len 32 --zero-stage 3 --dtype bf16
same 2 NCCL 2 1 --pp 2 --total-batch-size 132
same 4 NCCL 2 2 --pp 2 --schedule interleaved --n-layer 4 --zero-stage 3 --dtype bf16 --total-batch-size 264
same 4 NCCL 4 1 --pp 4 --n-layer 4 --total-batch-size 132
COMM=nccl same 1 NCCL 2 1   # which share a GPU
COMM=nccl same 1 NCCL 2 1 --zero-stage 3 --dtype bf16
same 1 TCP 2 1
same 1 TCP 2 2 --zero-stage 3 --dtype bf16
same 1 TCP 2 1 --tp 2 --sequence-parallel off
same 1 TCP 2 1 --cp 2 --seq-len 32 --cp-attention all-gather
same 1 TCP 2 1 --pp 2 --total-batch-size 132
same 8 NCCL 2 1   # which sees six GPUs that it does not use

# launched GPUS: the same two processes by mpirun, and as srun starts them
launched() {
  export EMULATED_GPUS=$1
  local process status=0 pids=() started=("${run[@]}" --local-ranks 1 --rendezvous "file:$dir/meet" --out-dir "$dir/launched")
  if command -v mpirun >/dev/null; then
    rm -rf "$dir/launched" "$dir/contexts"
    EMULATED_CONTEXTS=$dir/contexts mpirun --allow-run-as-root --oversubscribe -n 2 "${started[@]}" >"$dir/log.0" 2>&1 ||
      fail "mpirun, on $1 GPUs"
    one_context_each 2 1
  fi
  rm -rf "$dir/launched" "$dir/contexts"
  for process in 0 1; do
    env EMULATED_CONTEXTS="$dir/contexts" SLURM_PROCID=$process SLURM_LOCALID=$process SLURM_STEP_NUM_TASKS=2 \
      SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST="$(hostname)" "${started[@]}" \
      >"$dir/log.$process" 2>&1 &
    pids+=($!)
  done
  for process in "${pids[@]}"; do wait "$process" || status=$?; done
  [ $status -eq 0 ] || fail "srun, on $1 GPUs: status $status"
  one_context_each 2 1
}
for gpus in 1 2 8; do launched $gpus; done
[ -z "$(find /dev/shm -newer "$dir" -name '*nccl*' 2>/dev/null)" ] || fail 'something is left in /dev/shm'
echo 'long_emulated_processes_test: ok'
