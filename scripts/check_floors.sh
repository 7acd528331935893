#!/usr/bin/env bash
# Checks the structure of the code. Prints FILE:LINE and the rule for each violation, and exits 1 if there is any.
#
#   scripts/check_floors.sh [ROOT]          ROOT: the tree to check (default: the one that holds this script)
#
# 1. Folders are floors: a file in llmc/ includes files of its own floor and of the floors it stands on, as drawn in
#    llmc/README.md. train_gpt.cu and the tests are on top and may include everything.
# 2. Quoted includes are relative to llmc/ ("core/check.h"), without "..", and exist; tests also include from test/ and,
#    as "dev/...", from dev/.
# 3. Devices and libraries appear only in llmc/device, llmc/ops and the transports llmc/comm/comm_*: no other file has
#    an #if on their macros or includes their headers.
# 4. The transports are private to llmc/comm.
# 5. A CUDA kernel in a header is a template: nvcc puts any other into every object file, and they do not link.
# 6. No include cycles among headers.
# 7. The standard headers that most files use are included by llmc/core/std.h alone.
# 8. No source has more than 600 lines, and no folder more than 40 files. Whether a file has one purpose is for readers
#    to judge: the ten longest sources are printed for them.
set -euo pipefail
export LC_ALL=C   # wc says "total", sort compares bytes
CDPATH='' cd "${1:-$(dirname "$0")/..}"
failed=0
code=(llmc train_gpt.cu)
[ ! -d test ] || code+=(test)

# Rules 1 to 5, and 7.
# shellcheck disable=SC2016    # the dollars are awk's
find "${code[@]}" -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' \) |
  sort | xargs -r awk '
  BEGIN {
    floor("core")
    floor("text", "core")
    floor("device", "core")
    floor("ops", "device core")
    floor("net", "core")
    floor("schedule", "core")
    floor("comm", "schedule net ops device core")
    floor("shard", "comm schedule ops device core")
    floor("parallel", "shard comm schedule ops device core")
    floor("model", "parallel shard comm schedule ops device core")
    floor("data", "core")
    floor("train", "model parallel shard comm schedule ops device core")
    floor("run", "train data model parallel shard comm schedule net ops device text core")
    device_macro = "(__CUDA|__NVCC__|CUDA_VERSION|CUDART_VERSION|NCCL_|OMPI_|MPICH_|MPI_VERSION|" \
                   "TRAIN_GPT_(CUDA|CUBLASLT|CUDNN|NCCL|MPI))"
    device_header = "^(cuda[^/]*|cublas[^/]*|curand[^/]*|cudnn[^/]*|nccl[^/]*|nvml|mma|mpi|" \
                    "cooperative_groups.*|cub/.*)\\.(h|hpp|cuh)$|^cooperative_groups$"
    while ((getline line < "llmc/core/std.h") > 0)
      if (line ~ /^#include </) is_standard[substr(line, 11, length(line) - 11)] = 1
  }

  function floor(name, below,   i, names, n) {
    is_floor[name] = 1
    order = order (order ? " " : "") name
    n = split(name " " below, names, " ")
    for (i = 1; i <= n; ++i) stands_on[name, names[i]] = 1
  }

  function breach(text) { printf "%s:%d: %s\n", FILENAME, FNR, text; ++breaches }

  FNR == 1 {
    is_header = FILENAME ~ /h$/
    templated = 0
    split(FILENAME, path, "/")
    is_test = path[1] == "test"
    here = path[1] == "llmc" ? path[2] : ""   # empty: train_gpt.cu and test/, which are on top
    if (here && !is_floor[here]) breach("llmc/" here " is not a floor; the floors, bottom to top: " order)
    may_see_devices = is_test || FILENAME ~ /^llmc\/(device|ops)\// || FILENAME ~ /^llmc\/comm\/comm_/
    continued = 0
  }

  # A condition may continue after a backslash.
  { is_condition = continued || /^[ \t]*#[ \t]*(if|ifdef|ifndef|elif)[^a-z]/; continued = is_condition && /\\$/ }
  is_condition && !may_see_devices && match($0, device_macro "[A-Z_0-9]*") {
    breach("an #if on " substr($0, RSTART, RLENGTH) ": devices belong in llmc/device, llmc/ops and llmc/comm/comm_*")
  }

  # The head of a template may span several lines.
  /^template *</ { templated = !/^template *<>/ }
  is_header && /^(inline )?__global__/ && !templated {
    breach("a kernel that is not a template: nvcc would put one in every object file, and they would not link")
  }
  /[;}]$/ || /^$/ { templated = 0 }

  match($0, /^[ \t]*#[ \t]*include[ \t]*[<"][^>"]*/) {
    target = substr($0, RSTART, RLENGTH)
    quoted = target ~ /"/
    sub(/^[^<"]*[<"]/, "", target)
    if (target ~ device_header) {
      if (!may_see_devices)
        breach("include of " target ": devices belong in llmc/device, llmc/ops and llmc/comm/comm_*")
      next
    }
    if (!quoted && here && target in is_standard && FILENAME != "llmc/core/std.h")
      breach("include of <" target ">: include \"core/std.h\", which has it, or a header that includes that")
    if (!quoted || target == "build_info.h") next   # the latter is written by make
    if (target ~ /(^|\/)\.\.?\//) { breach("include of \"" target "\": make it relative to llmc/, as in \"core/check.h\""); next }
    split(target, path_there, "/")
    there = path_there[1]
    if (is_floor[here] && is_floor[there] && !stands_on[here, there])
      breach("include of \"" target "\": " here " may not include " there "; the floors, bottom to top: " order)
    if (target ~ /^comm\/comm_/ && !is_test && here != "comm")
      breach("include of \"" target "\": the transports are private to llmc/comm; include \"comm/comm.h\"")

    exists = (getline line < ("llmc/" target)) >= 0
    close("llmc/" target)
    if (!exists && is_test) {
      exists = (getline line < ("test/" target)) >= 0
      close("test/" target)
    }
    if (!exists && is_test && target ~ /^dev\//) {
      exists = (getline line < target) >= 0
      close(target)
    }
    if (!exists) breach("include of \"" target "\": there is no llmc/" target (is_test ? ", nor test/" target : ""))
  }

  END { exit breaches > 0 }
' || failed=1

# Rule 6.
loops=$(grep -HoE '^#include "[a-z_0-9/]+\.(h|cuh)"' -r llmc --include='*.h' --include='*.cuh' |
  sed -E 's,^llmc/([^:]*):#include "(.*)",\1 \2,' | tsort 2>&1 >/dev/null || true)
if [ -n "$loops" ]; then
  echo "headers that include each other in a cycle:"
  echo "$loops"
  failed=1
fi

# Rule 8.
for folder in dev scripts data; do [ ! -d "$folder" ] || code+=("$folder"); done
files=$(find "${code[@]}" -type f ! -path '*/golden/*' ! -path '*/results/*' \
  ! -path '*/__pycache__/*' ! -path 'data/*/*' ! -name '*.bin' | sort)
lengths=$(grep -E '\.(h|cuh|cu|cpp|py|sh|awk)$' <<<"$files" | xargs -r wc -l | awk '$2 != "total"' | sort -k1,1nr -k2)
long=$(awk '$1 > 600 { print $2 ":" $1 ": more than 600 lines: probably two files" }' <<<"$lengths")
crowded=$(awk '{ sub(/\/[^\/]*$/, ""); ++files[$0] }
  END {
    for (folder in files)
      if (files[folder] > 40) print folder ":1: " files[folder] " files in a folder, more than 40: probably two folders"
  }' <<<"$files")
for found in "$long" "$crowded"; do
  [ -z "$found" ] || { echo "$found"; failed=1; }
done

[ $failed -eq 0 ] || exit 1
awk 'NR <= 10 { printf "%s%s %d", NR == 1 ? "check-floors: the longest sources: " : ", ", $2, $1 } END { print "" }' <<<"$lengths"
echo 'check-floors: ok'
