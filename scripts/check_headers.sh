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
# the time, and the build does it anyway.
set -euo pipefail
cd "$(dirname "$0")/.."

export CXX=${CXX:-g++} FLAGS=${FLAGS:--std=c++20 -march=native -fopenmp -Wall -Wextra -Illmc}
export CUDA_FLAGS=${CUDA_FLAGS:--std=c++20 -DTRAIN_GPT_CUDA -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter \
  -Illmc -Itest -Itest/cuda_on_cpu}

# check FILE: prints the file's name and the compiler's messages if it does not compile.
check() {
  local program=$'#include "'${1#llmc/}$'"\n' flags=$FLAGS messages end='this is the end of the program'
  [[ $1 != *.cuh && $1 != *.cu ]] || flags=$CUDA_FLAGS
  [[ $1 != *.h && $1 != *.cuh ]] || program+=$program
  program+="static_assert(false, \"$end\");"
  # Flags may contain quotes, as on a command line.
  messages=$(eval "$CXX $flags -I. -Werror -Wfatal-errors -fsyntax-only -x c++ -" <<<"$program" 2>&1) || true
  [[ $messages != *error:*"$end"* ]] || return 0
  printf '%s:1: does not compile when it is all that a program includes (a header: twice):\n%s\n' "$1" "$messages"
  return 1
}
export -f check

if [ $# -gt 0 ]; then files=("$@"); else
  mapfile -t files < <({ find llmc -name '*.h' -o -name '*.cuh'; ls dev/bench/*.cpp dev/bench/cuda/*.cu \
    dev/comm/comm_bench.cpp dev/cuda/ladders.cu; } | LC_ALL=C sort)
fi
# shellcheck disable=SC2016    # bash -c gets the file as its argument
printf '%s\n' "${files[@]}" | xargs -P "${JOBS:-2}" -I '{}' bash -c 'check "$1"' check '{}' ||
  { echo 'check-headers: failed' >&2; exit 1; }
echo "check-headers: ok, ${#files[@]} files"
