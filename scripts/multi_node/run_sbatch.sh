#!/usr/bin/env bash
# Runs on the nodes of a Slurm cluster. Submit it from the directory of ./train_gpt, which all nodes must share;
# arguments after the script are passed to the trainer:
#
#   sbatch --ntasks-per-node 4 --cpus-per-task 8 scripts/multi_node/run_sbatch.sh --train-data ...        on CPUs
#   sbatch --gpus-per-node 8 --ntasks-per-node 8 --cpus-per-task 12 scripts/multi_node/run_sbatch.sh ...  on GPUs
#
# Without GPUs mpirun starts the tasks, with GPUs srun, one for each; LAUNCHER=mpirun or LAUNCHER=srun overrides this.
# Three minutes before its time limit the run is saved, and the job is queued again: the trainer resumes.
# `scancel --batch --signal=TERM JOB` saves it and ends the job with status 75; the same sbatch resumes later. Without
# --batch it would end mpirun, and `scancel JOB` may kill the run before all is saved.
#
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --output=train_gpt-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail
case $* in -h | --help) sed -n '/^#SBATCH/q; 2,$s/^# \{0,1\}//p' "$0"; exit ;; esac
refuse() { echo "run_sbatch.sh: $1" >&2; exit 1; }
[ -n "${SLURM_JOB_ID:-}" ] || refuse "it is for Slurm: sbatch $0 --train-data ..."
cd "$SLURM_SUBMIT_DIR"   # Slurm runs a copy of this script, elsewhere
[ -x ./train_gpt ] || refuse "there is no train_gpt in $PWD: build it, and submit from its directory"

# Used in the commands that a run suggests.
TRAIN_GPT_LAUNCH="${LAUNCHER:+LAUNCHER=$LAUNCHER }sbatch --nodes ${SLURM_JOB_NUM_NODES:-2}"
for option in NTASKS_PER_NODE CPUS_PER_TASK GPUS_PER_NODE; do
  name=SLURM_$option
  [ -z "${!name:-}" ] || TRAIN_GPT_LAUNCH+=" --$(tr _A-Z -a-z <<<"$option") ${!name}"
done
export TRAIN_GPT_LAUNCH+=" scripts/multi_node/run_sbatch.sh"

launcher=${LAUNCHER:-$([ -n "${SLURM_GPUS_ON_NODE:-}" ] && echo srun || echo mpirun)}
case $launcher in
  mpirun)
    command=(scripts/multi_node/run_mpirun.sh)
    [ -x "${command[0]}" ] || refuse "there is no ${command[0]} in $PWD: submit from the checkout, or with LAUNCHER=srun"
    ;;
  srun)
    # One token per job, for its processes only. It travels in the environment, which other users cannot read.
    if [ -z "${TRAIN_GPT_TOKEN:-}${TRAIN_GPT_TOKEN_FILE:-}" ]; then
      TRAIN_GPT_TOKEN=$(head -c 32 /dev/urandom | base64 -w 0)
      export TRAIN_GPT_TOKEN
    fi
    # Every process sees all GPUs of its node, as NCCL needs, and takes the one with its number. The first process to
    # end does not take the others with it: they may still be saving.
    command=(srun --export=ALL --kill-on-bad-exit=0 --cpu-bind=none ${SLURM_GPUS_ON_NODE:+--gpu-bind=none} ./train_gpt)
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK   # srun no longer asks sbatch
    ;;
  *) refuse "LAUNCHER=$launcher: expected mpirun or srun" ;;
esac

process='' signalled='' requeue=yes
pass_on() {
  signalled=yes again=yes
  [ -z "$process" ] || kill -USR1 "$process" || :   # which mpirun and srun pass on; SIGTERM would end the run
}
trap pass_on USR1
trap 'requeue=; pass_on' TERM
"${command[@]}" "$@" &
process=$! again=yes
[ -z "$signalled" ] || { sleep 1; pass_on; }   # it came before the process could take it
while [ -n "$again" ]; do   # a signal ends `wait` early
  again='' status=0
  wait "$process" || status=$?
done
if [ "$status" = 75 ] && [ -n "$requeue" ]; then
  scontrol requeue "$SLURM_JOB_ID" || echo "run_sbatch.sh: submit it again to go on" >&2
fi
exit "$status"
