#!/usr/bin/env bash
# Runs many processes on one host or several, with Open MPI's mpirun. Arguments are passed to the trainer.
#
#   HOSTS=node1,node2 RANKS=8 scripts/multi_node/run_mpirun.sh --train-data ...
#
# HOSTS   host names, separated by commas; default: this host. mpirun reaches the others by ssh, without a password
# RANKS   processes on each host
# Inside a Slurm job neither is needed: mpirun asks Slurm. Variables set options of mpirun, too: OMPI_MCA_btl=tcp,self.
# SIGINT and SIGTERM save the run and end it with status 75: mpirun itself would allow only a second for that.
set -euo pipefail
# Used in the commands that a run suggests.
export TRAIN_GPT_LAUNCH=${TRAIN_GPT_LAUNCH:-${HOSTS:+HOSTS=$HOSTS }${RANKS:+RANKS=$RANKS }$0}
cd "$(dirname "$0")/../.."
refuse() { echo "run_mpirun.sh: $1" >&2; exit 1; }

command -v mpirun >/dev/null || refuse "there is no mpirun here: install Open MPI, or use run_tcp.sh"
[[ $(mpirun --version) == *'Open MPI'* ]] || refuse "$(command -v mpirun) is not Open MPI's; with MPICH, use
  mpiexec -hosts node1,node2 -ppn 8 ./train_gpt ..."
where=()
if [ -n "${HOSTS:-}${RANKS:-}" ] || [ -z "${SLURM_JOB_ID:-}" ]; then
  [[ ${RANKS:-} =~ ^[1-9][0-9]*$ ]] || refuse "RANKS='${RANKS:-}': set it to the number of processes on each host"
  hosts=${HOSTS:-localhost}
  where=(--host "${hosts//,/:$RANKS,}:$RANKS")
fi

# Processes that MPI brings together share a token of their own; this one is for a build without MPI, with --rendezvous.
if [ -z "${TRAIN_GPT_TOKEN:-}${TRAIN_GPT_TOKEN_FILE:-}" ]; then
  TRAIN_GPT_TOKEN=$(head -c 32 /dev/urandom | base64 -w 0)
  export TRAIN_GPT_TOKEN
fi
# mpirun passes only its own variables to other hosts, so these are named; their values do not appear on a command line.
# An address is valid on this host alone.
variables=()
for name in "${!TRAIN_GPT_@}" "${!NCCL_@}" "${!OMP_@}"; do
  [ "$name" = TRAIN_GPT_ADDRESS ] || ! printenv "$name" >/dev/null || variables+=(-x "$name")
done

# --bind-to none: the trainer divides the processors of a host among its processes; mpirun would give each a core or a
# socket. setsid: so that a Ctrl-C at the terminal reaches mpirun only through this script.
setsid mpirun "${where[@]}" --bind-to none "${variables[@]}" ./train_gpt "$@" </dev/null &
mpirun=$!
trap 'again=yes; kill -USR1 $mpirun || :' INT TERM HUP USR1 USR2   # which mpirun passes on
again=yes
while [ -n "$again" ]; do   # a signal ends `wait` early
  again='' status=0
  wait "$mpirun" || status=$?
done
exit "$status"
