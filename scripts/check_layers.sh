#!/usr/bin/env bash
# Holds the rules that keep the house a house. Prints FILE:LINE and the rule for each breach, and exits 1 if there is any.
#
#   scripts/check_layers.sh [ROOT]          ROOT: the tree to check, by default the one that this script is in
#
# 1. Folders are floors: a file in llmc/ includes files of its own floor and of lower ones only. train_gpt.cu and the
#    tests stand on top and may include everything.
# 2. Includes in quotes are written from llmc/ ("core/check.h"), without "..", and exist.
# 3. Devices and libraries show only in llmc/device, llmc/ops and the transports llmc/dist/comm_*: nowhere else is
#    there an #if on their macros or an include of their headers.
# 4. The transports are private to llmc/dist.
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

# shellcheck disable=SC2016    # the dollars are awk's
find llmc test train_gpt.cu -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \) 2>/dev/null |
  LC_ALL=C sort | xargs -r awk '
  BEGIN {
    order = "core device ops dist model train"
    floors = split(order, name, " ")
    for (i = 1; i <= floors; ++i) rank[name[i]] = i
    top = floors + 1   # train_gpt.cu and test/
    device_macro = "(__CUDA|__NVCC__|CUDA_VERSION|CUDART_VERSION|NCCL_|OMPI_|MPICH_|MPI_VERSION|DNNL_|" \
                   "TRAIN_GPT_(CUDA|CUBLASLT|CUDNN|NCCL|MPI|ONEDNN))"
    device_header = "^(cuda[^/]*|cublas[^/]*|curand[^/]*|cudnn[^/]*|nccl[^/]*|nvml|mma|mpi|(oneapi/)?dnnl.*|" \
                    "cooperative_groups.*|cub/.*)\\.(h|hpp|cuh)$|^cooperative_groups$"
  }

  function breach(text) { printf "%s:%d: %s\n", FILENAME, FNR, text; ++breaches }

  FNR == 1 {
    split(FILENAME, path, "/")
    is_test = path[1] == "test"
    here = path[1] == "llmc" ? rank[path[2]] : top
    if (!here) breach("llmc/" path[2] " is no floor; the floors are, from below: " order)
    may_see_devices = is_test || FILENAME ~ /^llmc\/(device|ops)\// || FILENAME ~ /^llmc\/dist\/comm_/
    continued = 0
  }

  # A condition may go on after a backslash.
  { is_condition = continued || /^[ \t]*#[ \t]*(if|ifdef|ifndef|elif)[^a-z]/; continued = is_condition && /\\$/ }
  is_condition && !may_see_devices && match($0, device_macro "[A-Z_0-9]*") {
    breach("an #if on " substr($0, RSTART, RLENGTH) ": devices show only in llmc/device, llmc/ops and llmc/dist/comm_*")
  }

  match($0, /^[ \t]*#[ \t]*include[ \t]*[<"][^>"]*/) {
    target = substr($0, RSTART, RLENGTH)
    quoted = target ~ /"/
    sub(/^[^<"]*[<"]/, "", target)
    if (target ~ device_header) {
      if (!may_see_devices)
        breach("include of " target ": devices show only in llmc/device, llmc/ops and llmc/dist/comm_*")
      next
    }
    if (!quoted || target == "build_info.h") next   # the latter is written by make
    if (target ~ /(^|\/)\.\.?\//) { breach("include of \"" target "\": write it from llmc/, as in \"core/check.h\""); next }
    split(target, path_there, "/")
    there = rank[path_there[1]]
    if (there > here)
      breach("include of \"" target "\": " path_there[1] " is a higher floor than " path[2] "; from below: " order)
    if (target ~ /^dist\/comm_/ && !is_test && here != rank["dist"])
      breach("include of \"" target "\": the transports are private to llmc/dist; include \"dist/comm.h\"")

    exists = (getline line < ("llmc/" target)) >= 0
    close("llmc/" target)
    if (!exists && is_test) {
      exists = (getline line < ("test/" target)) >= 0
      close("test/" target)
    }
    if (!exists) breach("include of \"" target "\": there is no llmc/" target (is_test ? ", nor test/" target : ""))
  }

  END { exit breaches > 0 }
' && echo 'check-layers: ok'
