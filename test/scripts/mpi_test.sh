#!/usr/bin/env bash
# MpiLinks (llmc/comm/comm_mpi.h) between processes under mpirun, by test/mpi/exchanges.cpp: all pairs of ranks in
# several groups at once, also in parts; wrong lengths are named; abort() wakes all who wait.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
if ! grep -q '^MPI_VERSION := .' build/config.mk || [ -z "${MPI_VERSION-as found}" ]; then
  echo "mpi_test: skipped: this build has no MPI (make config)"
  exit 77
elif ! grep -q '^MPIRUN_VERSION := .' build/config.mk; then
  echo "mpi_test: skipped: there is no mpirun that works (make config)"
  exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "mpi_test: $*"
  cat "$dir/log"
  exit 1
}
# The seconds that mpirun waits before it kills processes that do not end.
export OMPI_MCA_odls_base_sigkill_timeout=0 PRTE_MCA_odls_base_sigkill_timeout=0
run() { timeout 60 scripts/multi_node/local_mpirun.sh "$@" >"$dir/log" 2>&1; }

data() { # PROCESSES LOCAL_RANKS PART_BYTES
  run -n "$1" build/mpi/exchanges data "$2" "$3" || fail "data went wrong: $*"
  grep -q "[0-9]: $(($1 * $2)) ranks" "$dir/log" || fail "not $1 processes of $2 ranks"
}
data 2 3 1073741824
data 4 2 100000
timeout 60 build/mpi/exchanges data 2 100000 >"$dir/log" 2>&1 || fail 'a process without mpirun is not a job of one'

# ends OUTCOME_0 OUTCOME_1 ARGUMENTS...: what the two processes saw
ends() {
  local wanted=$1$'\n'$2
  shift 2
  rm -rf "$dir/seen" && mkdir "$dir/seen"
  ! run -n 2 build/mpi/exchanges "$@" "$dir/seen" || fail "exit status 0: $*"
  [ "$(cat "$dir"/seen/[01])" = "$wanted" ] || fail "$*: expected '$wanted', found '$(cat "$dir"/seen/*)'"
}
# length SENT EXPECTED AS_NAMED: parts have 1000 bytes. The sender finishes; other groups end with the faulty one.
length() { ends nothing "rank 0 sent $3 bytes to rank 1, which expected $2, in group 4; PeerError" length "$1" "$2"; }
length 0 8 0
length 16 8 16
length 2500 1500 'at least 2000'
length 2000 2500 2000
woken='PeerError PeerError PeerError soon asleep'
ends "$woken" "$woken" abort
echo 'mpi_test: ok'
