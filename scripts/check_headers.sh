#!/usr/bin/env bash
# Checks that every header of llmc/ compiles alone, and twice: each is compiled as a program that includes only it, two
# times. Warnings are errors. `make check` passes the build's own flags.
#
#   FLAGS=... [NVCC_FLAGS=...] scripts/check_headers.sh [HEADER...]       without NVCC_FLAGS, .cuh files are skipped
set -euo pipefail
cd "$(dirname "$0")/.."

export CXX=${CXX:-g++} FLAGS=${FLAGS:--std=c++20 -march=native -fopenmp -Wall -Wextra -Illmc}
export NVCC=${NVCC:-nvcc} NVCC_FLAGS=${NVCC_FLAGS:-}

# check HEADER: prints the header's name and the compiler's messages if it does not compile.
check() {
  local program status=0 messages
  program=$(printf '#include "%s"\n#include "%s"\n' "${1#llmc/}" "${1#llmc/}")
  # Both flags may quote (-Xcompiler '...'), as on a command line.
  case $1 in
    *.cuh)
      if [ -z "$NVCC_FLAGS" ]; then
        echo "check-headers: $1 skipped: no nvcc here"
        return
      fi
      # nvcc cannot read standard input and has no -fsyntax-only
      messages=$(dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT && echo "$program" >"$dir/check.cu" &&
        eval "$NVCC -x cu $NVCC_FLAGS -Werror all-warnings -ptx -o $dir/check.ptx $dir/check.cu" 2>&1) || status=$? ;;
    *) messages=$(eval "$CXX $FLAGS -Werror -fsyntax-only -x c++ -" <<<"$program" 2>&1) || status=$? ;;
  esac
  [ $status -eq 0 ] || printf '%s:1: does not compile when it is included alone, twice:\n%s\n' "$1" "$messages"
  return $status
}
export -f check

if [ $# -gt 0 ]; then headers=("$@"); else
  mapfile -t headers < <(find llmc -name '*.h' -o -name '*.cuh' | LC_ALL=C sort)
fi
# shellcheck disable=SC2016    # bash -c gets the header as its argument
printf '%s\n' "${headers[@]}" | xargs -P "${JOBS:-2}" -I '{}' bash -c 'check "$1"' check '{}' ||
  { echo 'check-headers: failed' >&2; exit 1; }
echo "check-headers: ok, ${#headers[@]} headers"
