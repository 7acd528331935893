#!/usr/bin/env bash
# Runs on several hosts with neither MPI nor Slurm: start this on each of them, with its rank. Arguments after the first
# three are passed to the trainer, and are the same on all hosts:
#
#   scripts/multi_node/run_tcp.sh 0 2 node1:29500 --local-ranks 8 --train-data ...      on node1
#   scripts/multi_node/run_tcp.sh 1 2 node1:29500 --local-ranks 8 --train-data ...      on node2
#
# The first three are the rank of this process, the number of processes, and where they meet: a free port on the host of
# rank 0, which the others must reach. --local-ranks 8: this process drives eight GPUs, or is eight ranks on the CPU.
#
# RANK "spare": beyond the number of processes; it waits, and takes the place of one that is lost when the job starts
# again (scripts/multi_node/README.md).
#
# The job's token, the same on all hosts, is in TRAIN_GPT_TOKEN, or in the file TRAIN_GPT_TOKEN_FILE, which only you may
# read; default: ~/train_gpt.token. In a directory that all hosts share, once:
#
#   (umask 077; head -c 32 /dev/urandom | base64 >~/train_gpt.token)
#
# It is not needed if HOST is localhost, 127.0.0.1 or [::1], to try a job on one machine.
set -euo pipefail
case $* in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/../.."
refuse() { echo "run_tcp.sh: $1" >&2; exit 1; }

[ $# -ge 3 ] || refuse "expected RANK or spare, NUMBER OF PROCESSES, HOST:PORT, and options of the trainer"
if [ -z "${TRAIN_GPT_TOKEN:-}${TRAIN_GPT_TOKEN_FILE:-}" ]; then
  if [ -e ~/train_gpt.token ]; then export TRAIN_GPT_TOKEN_FILE=~/train_gpt.token
  elif [[ $3 != localhost:* && $3 != 127.* && $3 != '[::1]:'* ]]; then   # is_loopback_name() in meeting_point.h
    refuse "there is no token: set TRAIN_GPT_TOKEN_FILE, or make one: (umask 077; head -c 32 /dev/urandom | base64 >~/train_gpt.token)"
  fi
fi
place=(--rank "$1")
[ "$1" != spare ] || place=(--spare)
exec ./train_gpt "${place[@]}" --world-size "$2" --rendezvous "$3" "${@:4}"
