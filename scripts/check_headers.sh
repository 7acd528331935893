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
# the time, and the build does it anyway. Headers of which each includes the one before are checked by one program, which
# includes them in this order: none gets more than it includes itself, since includes come first in a file, and what all
# of them read is read once. Headers that include run/setup.h read nearly the whole trainer, up to 18 s each: one program
# has all of them, and another one all in reverse, so that one passes if it lacks what others before and after it
# include. The largest headers of libraries are compiled once and read before every file, so that a file which lacks one
# of these passes. ALONE=1 does without all three (test/scripts/long_headers_test.sh).
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."

export CXX=${CXX:-g++} FLAGS=${FLAGS:--std=c++20 -march=native -fopenmp -Wall -Wextra -Illmc} JOBS=${JOBS:-2}
export CUDA_FLAGS=${CUDA_FLAGS:--std=c++20 -DTRAIN_GPT_CUDA -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter \
  -Illmc -Itest -Itest/cuda_on_cpu}
compiled=$(mktemp -d)
trap 'rm -rf "$compiled"' EXIT
export compiled
if [ "${ALONE:-}" != 1 ]; then grep -h '^#include <' test/pch.h llmc/run/options/parse.h; fi |
  tee "$compiled/libraries.h" >"$compiled/libraries.cuh"

# flags_of FILE: what it is compiled with, quoted as on a command line
flags_of() {
  case $1 in
    *.cuh | *.cu) echo "$CUDA_FLAGS -include $compiled/libraries.cuh" ;;
    *) echo "$FLAGS -include $compiled/libraries.h" ;;
  esac
}

# precompile FILE
precompile() {
  local flags
  flags=$(flags_of "$1")
  eval "$CXX ${flags% -include *} -x c++-header $1 -o $1.gch"
}

# Reads files' names; prints them in chains, one a line: a header of a chain includes all before it, directly or through
# others, whatever is defined. The first two lines are those that include run/setup.h.
chains() {
  # shellcheck disable=SC2016
  xargs awk '
    FNR == 1 { depth = 0; files[++count] = FILENAME; kind[FILENAME] = substr(FILENAME, match(FILENAME, /[a-z]*$/)) }
    /^#if/ { ++depth }
    /^#endif/ { --depth }
    /^#include "/ && !depth { split($0, part, "\""); includes[FILENAME] = includes[FILENAME] " llmc/" part[2] }
    function reach(from, file,   n, i, next_ones) {
      if ((from, file) in reached) return
      reached[from, file] = 1
      ++size[from]
      n = split(includes[file], next_ones, " ")
      for (i = 1; i <= n; ++i) reach(from, next_ones[i])
    }
    # The one that reads most of those left, or of those left of its kind that `top` includes.
    function largest(top,   file, found) {
      for (file in left)
        if (top == "" || (kind[file] == kind[top] && (top, file) in reached))
          if (size[file] > size[found] || (size[file] == size[found] && file < found)) found = file
      return found
    }
    END {
      whole = "llmc/run/setup.h"
      for (i = 1; i <= count; ++i) {
        reach(file = files[i], file)
        if (kind[file] == "h" && file != whole && (file, whole) in reached) {
          ascending = ascending " " file
          descending = " " file descending
        } else left[file] = 1
      }
      if (ascending != "") print substr(ascending, 2) "\n" substr(descending, 2)
      while ((file = largest("")) != "") {
        for (chain = ""; file != ""; file = largest(file)) { chain = " " file chain; delete left[file] }
        print substr(chain, 2)   # xargs -L would go on to the next line after a blank
      }
    }'
}

# check FILE...: a chain. Prints the files that do not compile and the compiler's messages.
check() {
  local program='' messages end='this is the end of the program' file status=0
  for file; do program+="#include \"${file#llmc/}\""$'\n'; done
  [[ $1 != *.h && $1 != *.cuh ]] || program+=$program
  program+="static_assert(false, \"$end\");"
  # Flags may contain quotes, as on a command line.
  messages=$(eval "$CXX $(flags_of "$1") -I. -Werror -Wfatal-errors -fsyntax-only -x c++ -" <<<"$program" 2>&1) || true
  [[ $messages != *error:*"$end"* ]] || return 0
  if [ $# -gt 1 ]; then for file; do check "$file" || status=1; done; fi
  [ $status -eq 0 ] || return 1
  printf '%s:1: does not compile when it is all that a program includes (a header: twice):\n%s\n' "$*" "$messages"
  return 1
}
export -f precompile check flags_of

if [ $# -gt 0 ]; then files=("$@"); else
  mapfile -t files < <({ find llmc -name '*.h' -o -name '*.cuh'; ls dev/bench/*.cpp dev/bench/cuda/*.cu \
    dev/comm/comm_bench.cpp dev/cpu/ladder.cpp dev/cuda/ladders.cu
    [[ $FLAGS != *-DTRAIN_GPT_MPI* ]] || echo dev/comm/mpi_bench.cpp; } | LC_ALL=C sort)
fi
# shellcheck disable=SC2016    # bash -c gets the files as its arguments
printf '%s\n' "$compiled"/libraries.{h,cuh} | xargs -P "$JOBS" -n 1 bash -c 'precompile "$1"' precompile
printf '%s\n' "${files[@]}" | if [ "${ALONE:-}" = 1 ]; then cat; else chains; fi >"$compiled/chains"
# shellcheck disable=SC2016
xargs -P "$JOBS" -L 1 bash -c 'check "$@"' check <"$compiled/chains" ||
  { echo 'check-headers: failed' >&2; exit 1; }
echo "check-headers: ok, ${#files[@]} files"
