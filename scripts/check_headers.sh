#!/usr/bin/env bash
# Checks that every header of llmc/ compiles alone, and twice: as a program that includes only this header, two times.
# Also checks that the benchmarks compile, which `make test` does not build. Warnings are errors. `make check` passes
# the build's own flags.
#
#   FLAGS=... CUDA_FLAGS=... scripts/check_headers.sh [FILE...]
#
# .cuh and .cu files are compiled as the tests compile them, for the CPU (test/cuda_on_cpu), which needs no nvcc.
#
# The program ends with an error, so that the compiler stops before it instantiates templates: that takes two thirds of
# the time, and the build does it anyway. What takes longest to read is compiled once, for those that include it: since
# it is checked itself, and includes come first in a file, they do not get away with less. The standard library's largest
# headers are compiled once too and read before every file, so that a file which lacks one of these passes; ALONE=1 does
# without (test/scripts/long_headers_test.sh).
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

export CXX=${CXX:-g++} FLAGS=${FLAGS:--std=c++20 -march=native -fopenmp -Wall -Wextra -Illmc} JOBS=${JOBS:-2}
export CUDA_FLAGS=${CUDA_FLAGS:--std=c++20 -DTRAIN_GPT_CUDA -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter \
  -Illmc -Itest -Itest/cuda_on_cpu}
large=(run/job.h run/options/parse.h run/plan/planner.h train/step_config.h comm/groups.h run/options/options.h ops/ops_memory.h
  ops/cpu/simd.h core/check.h)   # the larger first
compiled=$(mktemp -d)
trap 'rm -rf "$compiled"' EXIT
export compiled
if [ "${ALONE:-}" != 1 ]; then sed -n '/^#include <[a-z]*>/p' test/pch.h; fi >"$compiled/standard.h"

# precompile HEADER: into $compiled/HEADER.gch, which the compiler takes where it is told to include $compiled/HEADER.
precompile() {
  local flags=$FLAGS header=$compiled/$1
  case $1 in
    standard.h) ;;
    standard.cuh) cp "$compiled/standard.h" "$header" && flags=$CUDA_FLAGS ;;
    *) mkdir -p "${header%/*}" && { cat "$compiled/standard.h" && echo "#include \"$1\""; } >"$header" ;;
  esac
  eval "$CXX $flags -x c++-header $header -o $header.gch" >"$header.log" 2>&1 || rm -f "$header"
}

# Prints each header with the first of the large ones that it includes, directly or through others.
largest_includes() {
  grep -rE --include='*.h' --include='*.cpp' '^#include "' llmc dev | awk -F '[:"]' -v large="${large[*]}" '
    { files[$1] = files[$1] " llmc/" $(NF - 1) }
    function reach(file,   n, i, next_ones) {
      if (file in reached) return
      reached[file] = 1
      n = split(files[file], next_ones, " ")
      for (i = 1; i <= n; ++i) reach(next_ones[i])
    }
    END {
      n = split(large, names, " ")
      for (file in files) {
        split("", reached)
        reach(file)
        for (i = 1; i <= n; ++i)
          if ("llmc/" names[i] != file && ("llmc/" names[i]) in reached) { print file, names[i]; break }
      }
    }'
}

# check FILE: prints the file's name and the compiler's messages if it does not compile.
check() {
  local program=$'#include "'${1#llmc/}$'"\n' flags=$FLAGS messages end='this is the end of the program' include
  include=$(sed -n "s,^$1 ,,p" "$compiled/largest_includes")
  if [[ $1 = *.cuh || $1 = *.cu ]]; then flags=$CUDA_FLAGS include=standard.cuh
  elif [[ -z $include || ! -e $compiled/$include ]]; then include=standard.h; fi
  flags+=" -include $compiled/$include"
  [[ $1 != *.h && $1 != *.cuh ]] || program+=$program
  program+="static_assert(false, \"$end\");"
  # Flags may contain quotes, as on a command line.
  messages=$(eval "$CXX $flags -I. -Werror -Wfatal-errors -fsyntax-only -x c++ -" <<<"$program" 2>&1) || true
  [[ $messages != *error:*"$end"* ]] || return 0
  printf '%s:1: does not compile when it is all that a program includes (a header: twice):\n%s\n' "$1" "$messages"
  return 1
}
export -f precompile check

if [ $# -gt 0 ]; then files=("$@") large=(); else
  mapfile -t files < <({ find llmc -name '*.h' -o -name '*.cuh'; ls dev/bench/*.cpp dev/bench/cuda/*.cu \
    dev/comm/comm_bench.cpp dev/cpu/ladder.cpp dev/cuda/ladders.cu
    [[ $FLAGS != *-DTRAIN_GPT_MPI* ]] || echo dev/comm/mpi_bench.cpp; } | LC_ALL=C sort)
fi
largest_includes >"$compiled/largest_includes"
# shellcheck disable=SC2016    # bash -c gets the file as its argument
printf '%s\n' standard.h standard.cuh "${large[@]}" | xargs -r -P "$JOBS" -I '{}' bash -c 'precompile "$1"' precompile '{}'
# shellcheck disable=SC2016
printf '%s\n' "${files[@]}" | xargs -P "$JOBS" -I '{}' bash -c 'check "$1"' check '{}' ||
  { echo 'check-headers: failed' >&2; exit 1; }
echo "check-headers: ok, ${#files[@]} files"
