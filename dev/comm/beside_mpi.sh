#!/usr/bin/env bash
# Compares our rings over MpiLinks with MPI's own collectives, between processes of this machine. Prints a table for
# dev/results/: bus bandwidth in GB/s, from the median over alternating runs of their median times.
#
#   make comm-bench && dev/comm/beside_mpi.sh [PROCESSES [LARGEST_MIB [RUNS]]]      default: 2 64 5
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export LC_ALL=C   # awk reads and prints numbers with a point
processes=${1:-2} largest=${2:-64} runs=${3:-5}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
for ((run = 1; run <= runs; ++run)); do
  for form in mpi ring; do
    scripts/multi_node/local_mpirun.sh -n "$processes" build/mpi_bench $form "$largest" >"$dir/$form.$run"
  done
done
echo "$(sed -n 's/^MPI_VERSION := //p' build/config.mk), $processes processes of 1 thread on $(nproc) processors, fp32, $runs runs"
echo
echo '| collective | bytes | MPI GB/s | ours GB/s | ours / MPI |'
echo '| --- | ---: | ---: | ---: | ---: |'
for form in mpi ring; do
  sort -s -k1,1 -k2,2n -k3,3n "$dir/$form".* |
    awk -v runs="$runs" 'NR % runs == int((runs + 1) / 2) % runs { print $1, $2, $3 }' >"$dir/$form"
done
paste -d ' ' "$dir/mpi" "$dir/ring" | awk -v P="$processes" '{
  bus = (P - 1) / P * ($1 == "all_reduce" ? 2 : 1) * $2 / 1000
  printf "| %s | %d | %.2f | %.2f | %.2f |\n", $1, $2, bus / $3, bus / $6, $3 / $6
}'
