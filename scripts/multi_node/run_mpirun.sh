#!/usr/bin/env bash
# Runs many processes on one host or several, with Open MPI's mpirun. Arguments are passed to the trainer.
#
#   HOSTS=node1,node2 RANKS=8 scripts/multi_node/run_mpirun.sh --train-data ...
#
# HOSTS   host names, separated by commas; default: this host. mpirun reaches the others by ssh, without a password
# RANKS   processes on each host
# Inside a Slurm job neither is needed: mpirun asks Slurm. Variables set options of mpirun, too: OMPI_MCA_btl=tcp,self.
# If a host vanishes, the trainers end, but mpirun would wait for its daemon there for a quarter of an hour or longer. Start
# this on the first of HOSTS: then, once the trainers here have been gone for a minute, mpirun is killed, and the exit
# status is 3.
# SIGINT and SIGTERM save the run and end it with status 75: mpirun itself would allow only a second for that.
set -euo pipefail
case $* in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
# Used in the commands that a run suggests.
export TRAIN_GPT_LAUNCH=${TRAIN_GPT_LAUNCH:-${HOSTS:+HOSTS=$HOSTS }${RANKS:+RANKS=$RANKS }$(printf %q "$0")}
CDPATH='' cd "$(dirname "$0")/../.."
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

# These bridges have the same address on all hosts that have them, so that MPI would look for another host on its own.
if [ -z "${OMPI_MCA_btl_tcp_if_include:-}${OMPI_MCA_btl_tcp_if_exclude:-}" ]; then
  export OMPI_MCA_btl_tcp_if_exclude=127.0.0.1/8,sppp,docker0,virbr0   # the first two are Open MPI's own
fi
if [ -z "${OMPI_MCA_oob_tcp_if_include:-}${OMPI_MCA_oob_tcp_if_exclude:-}" ]; then
  export OMPI_MCA_oob_tcp_if_exclude=docker0,virbr0
fi

mpirun='' signalled=''
pass_on() {
  signalled=yes again=yes
  [ -z "$mpirun" ] || kill -USR1 "$mpirun" || :   # which mpirun passes on
}
trap pass_on INT TERM HUP USR1 USR2
# --bind-to none: the trainer divides the processors of a host among its processes; mpirun would give each a core or a
# socket. setsid: so that a Ctrl-C at the terminal reaches mpirun only through this script.
setsid mpirun "${where[@]}" --bind-to none "${variables[@]}" ./train_gpt "$@" </dev/null &
mpirun=$!
[ -z "$signalled" ] || { sleep 1; pass_on; }   # it came before mpirun could take it

# Kills mpirun, and its ssh, once the trainer of rank 0 was here, and none has been for a minute.
watch() {
  local begun='' left=60 file pid name children more trains
  trap - INT TERM HUP USR1 USR2
  exec {never}<> <(:)   # a pipe that nobody writes to
  while [ $left -gt 0 ]; do
    read -r -t 5 -u "$never" || :
    kill -0 "$mpirun" 2>/dev/null || return 0
    children=() trains=''
    for file in "/proc/$mpirun/task/"*/children; do
      more=()
      read -r -a more 2>/dev/null <"$file" || :
      children+=("${more[@]}")
    done
    for pid in "${children[@]}"; do
      read -r name 2>/dev/null <"/proc/$pid/comm" || continue
      [ "$name" = train_gpt ] || continue
      trains=yes
      [ -n "$begun" ] || ! grep -zqsE '^(OMPI_COMM_WORLD_RANK|PMIX_RANK)=0$' "/proc/$pid/environ" || begun=yes
    done
    if [ -n "$trains" ]; then left=60
    elif [ -n "$begun" ]; then left=$((left - 5)); fi
  done
  echo "run_mpirun.sh: the trainers on this host ended a minute ago, but mpirun has not: it is killed" >&2
  trap '' TERM
  kill -KILL "$mpirun" "${children[@]}" || :
  return 3
}
watch &
watch=$!
again=yes
while [ -n "$again" ]; do   # a signal ends `wait` early
  again='' status=0
  wait "$mpirun" || status=$?
done
kill "$watch" 2>/dev/null || :
wait "$watch" || [ $? -ne 3 ] || status=3
exit "$status"
