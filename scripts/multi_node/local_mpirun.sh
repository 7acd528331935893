#!/usr/bin/env bash
# mpirun on this machine alone, as tests and benchmarks need it: works as root, with more processes than processors
# (which are then bound to none), and without a network.
#
#   scripts/multi_node/local_mpirun.sh -n PROCESSES PROGRAM [ARGUMENTS...]
#
# From the environment: MPIRUN, another mpirun. Jobs across nodes: the other scripts here.
set -euo pipefail
# For Open MPI 4, and for Open MPI 5, whose launcher is PRRTE. MPICH needs no permission for any of this.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_plm=isolated
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
launch=$(printf '%q ' "$0" "${@:1:3}")
[ "${1:-}" != -n ] || export TRAIN_GPT_LAUNCH=${launch% }   # for the commands that a run suggests
# shellcheck disable=SC2086    # a list of words
exec ${MPIRUN:-mpirun} "$@"
