#!/usr/bin/env bash
# scripts/multi_node/run_sbatch.sh on a Slurm cluster of two nodes, both on this machine: started for this test, with
# directories and ports of its own, and stopped at its end. A run of two processes on each node is stopped by a signal,
# ends with status 75, and goes on with the next sbatch; another is queued again by itself. In the end weights,
# optimizer state and metrics are bitwise those of an uninterrupted run of four threads. By mpirun, by srun with TCP,
# and by srun with PMIx.
#
# Takes root, and installs Slurm where it is missing (scripts/install_deps.sh slurm).
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
skip() { echo "long_slurm_test: skipped: $1"; exit 77; }
[ "$(id -u)" = 0 ] || skip "Slurm's daemons are started as root"
scripts/install_deps.sh --if-needed slurm test || skip "Slurm is missing and could not be installed"
command -v mpirun >/dev/null || skip "there is no mpirun"

# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
dir=$(mktemp -d)
export SLURM_CONF=$dir/slurm.conf
daemons=()
finish() {
  scancel --user=root --state=PENDING
  scancel --user=root --full --signal=KILL
  for _ in $(seq 50); do [ -n "$(squeue --noheader)" ] || break; sleep 0.1; done
  kill "${daemons[@]}"
  for _ in $(seq 50); do kill -0 "${daemons[@]}" || break; sleep 0.1; done
  # Kills what is left, such as a step that was torn down: all processes with this cluster's configuration.
  # shellcheck disable=SC2046
  kill_all KILL $(grep -lzs "^SLURM_CONF=$SLURM_CONF$" /proc/[0-9]*/environ | cut -d / -f 3)
  rm -rf "$dir"
} 2>/dev/null
trap 'set +e; finish' EXIT
trap 'exit 130' INT TERM
fail() {
  tail -n 20 "$dir"/*.log "$dir"/*.out >&2
  echo "long_slurm_test: $1" >&2
  exit 1
}

# ---- The cluster -----------------------------------------------------------------------------------------------------

read -r -a ports < <(python3 -c '
import socket
sockets = [socket.socket() for _ in range(3)]
for s in sockets: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')
here=$(hostname -s)
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$here(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
TmpFS=$dir/%n.tmp
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$here NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2
NodeName=n2 NodeHostname=$here NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
CONF
mkdir "$dir/n1.tmp" "$dir/n2.tmp"
(umask 077; head -c 128 /dev/urandom >"$dir/munge.key")
daemon() { # NAME COMMAND...
  local name=$1
  shift
  "$@" >"$dir/$name.log" 2>&1 </dev/null &
  daemons+=($!)
}
# --force: accepts a directory that belongs to a user, not to the system
daemon munged munged --foreground --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
  --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
daemon slurmctld slurmctld -D -c
daemon n1 slurmd -D -N n1
daemon n2 slurmd -D -N n2
# wait_for COMMAND...: waits until it succeeds, a minute at most
wait_for() {
  for _ in $(seq 600); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.1
  done
  fail "waited a minute in vain for: $*"
}
both_are_idle() { [ "$(sinfo --noheader --Node --states=idle --format=%N | wc -l)" = 2 ]; }
wait_for both_are_idle
# shellcheck disable=SC2016  # for the tasks
names=$(srun --nodes=2 --ntasks-per-node=2 bash -c 'echo "$SLURM_PROCID$SLURMD_NODENAME"' | sort | tr '\n' ' ')
[ "$names" = '0n1 1n1 2n2 3n2 ' ] || fail "srun started $names, not two tasks on each node"
echo "long_slurm_test: two nodes of $(slurmd -V) are up"

# ---- Runs ------------------------------------------------------------------------------------------------------------

# Open MPI would use shared memory between nodes on one host, where its files are named after the nodes.
export OMPI_MCA_btl=tcp,self OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
run=(--model d1 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --total-batch-size 264 --lr 1e-2
  --zero-stage 2 --max-steps "${STEPS:-1500}" --checkpoint-every 400 --val-every 500 --val-steps 2 --threads 1
  --train-data test/golden/gpt2_tiny/train.bin --val-data test/golden/gpt2_tiny/train.bin)
# results OUT: the results that must not depend on who started the ranks and who stopped them
results() {
  (cd "$(printf '%s\n' "$1"/step-* | tail -n 1)" && basename "$PWD" && sha256sum -- *.safetensors)
  python3 - "$1/metrics.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    object = json.loads(line)
    if object["kind"] != "checkpoint": print(*(object.get(name) for name in ("kind", "step", "loss", "grad_norm", "lr")))
PY
}
same() { # OUT
  results "$1" >"$dir/now.txt"
  cmp -s "$dir/whole.txt" "$dir/now.txt" || fail "$1 differs: $(diff "$dir/whole.txt" "$dir/now.txt" | sed -n 1,6p)"
}
# submit OUT [OPTION...]: prints the number of the job
submit() {
  sbatch --parsable --ntasks-per-node=2 --output="$1.out" scripts/multi_node/run_sbatch.sh "${run[@]}" --out-dir "$@"
}
in_step() { [ -e "$1/metrics.jsonl" ] && [ "$(grep -c '"kind":"train"' "$1/metrics.jsonl")" -ge "$2" ]; }   # OUT STEP
state_of() { scontrol --oneliner show job "$1" | grep -oE '(JobState|ExitCode|Restarts)=[^ ]*' | tr '\n' ' '; }
has_ended() { [[ $(state_of "$1") != *=@(RUNNING|COMPLETING|PENDING)* ]]; }
ended() { # JOB STATE
  wait_for has_ended "$1"
  [[ $(state_of "$1") = *"$2"* ]] || fail "job $1 ended with $(state_of "$1"), expected $2"
}

./train_gpt "${run[@]}" --local-ranks 4 --out-dir "$dir/whole" >"$dir/whole.out" 2>&1 || fail "four threads failed"
results "$dir/whole" >"$dir/whole.txt"

# mpirun; stopped by a signal, and submitted again
out=$dir/mpirun
job=$(submit "$out")
wait_for in_step "$out" 100
scancel --batch --signal=TERM "$job"
ended "$job" ExitCode=75:0
grep -q 'saved' "$out.out" || fail "the run that was stopped does not say that it saved"
[[ $(state_of "$job") = *Restarts=0* ]] || fail "job $job was queued again, although it was told to end"
[ ! -e "$out/step-00${STEPS:-1500}" ] || fail "the run was done before it could be stopped: set STEPS higher"
job=$(submit "$out")
ended "$job" ExitCode=0:0
same "$out"
echo "long_slurm_test: mpirun: stopped with status 75, submitted again, and bitwise the run of four threads"

# srun, and TCP; stopped as if the time were up, so that Slurm starts it again. The names of these nodes have no
# address, so they meet by a file, which is still there when they meet again.
out=$dir/srun
export LAUNCHER=srun
job=$(submit "$out" --rendezvous "file:$dir/meet")
wait_for in_step "$out" 100
scancel --batch --signal=USR1 "$job"
is_queued_again() { [[ $(state_of "$job") = *PENDING*Restarts=1* || $(state_of "$job") = *Restarts=1*PENDING* ]]; }
wait_for is_queued_again
# Slurm itself would wait two minutes, and within the same second it would still take the job for a killed one.
sleep 3
scontrol update JobId="$job" StartTime=now
ended "$job" ExitCode=0:0
same "$out"
echo "long_slurm_test: srun and TCP: queued again after status 75, and bitwise the run of four threads"

# srun, which tells MPI about the processes
if [[ $(srun --mpi=list 2>&1) = *pmix* ]]; then
  out=$dir/pmix
  export SLURM_MPI_TYPE=pmix
  job=$(submit "$out")
  ended "$job" ExitCode=0:0
  same "$out"
  grep -q 'tensors go by Open MPI' "$out.out" || fail "srun --mpi=pmix: the processes did not use MPI"
  echo "long_slurm_test: srun --mpi=pmix: bitwise the run of four threads"
fi
echo "long_slurm_test: ok"
