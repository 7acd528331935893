#!/usr/bin/env bash
# scripts/check_floors.sh and check_shell.sh accept this tree, and reject each violation planted in a copy of it;
# check_headers.sh does so in a tree of its own. The environment does not change what build/config.mk says about this
# machine.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
fail() { echo "checks_test.sh: $*"; exit 1; }

scripts/check_floors.sh || fail "this tree breaks the rules above"

# refuses FILE LINE EXPECTED: with LINE appended to FILE the check fails, naming FILE, the line and EXPECTED
refuses() {
  local file=$1 line=$2 expected=$3 output number
  rm -rf "$copy/tree" && mkdir "$copy/tree" && cp -r llmc train_gpt.cu "$copy/tree"
  mkdir -p "$copy/tree/$(dirname "$file")"
  printf '%s\n' "$line" >>"$copy/tree/$file"
  number=$(wc -l <"$copy/tree/$file")
  ! output=$(scripts/check_floors.sh "$copy/tree") || fail "'$line' in $file passed"
  [[ $output == *"$file:$number: "*"$expected"* ]] || fail "'$line' in $file was refused with: $output"
}

refuses llmc/core/planted.h '#include "train/trainer.h"' 'core may not include train'
refuses llmc/data/planted.h '#include "train/trainer.h"' 'data may not include train'
refuses llmc/schedule/planted.h '#include "ops/ops.h"' 'schedule may not include ops'
refuses llmc/comm/planted.h '#include "shard/zero.h"' 'comm may not include shard'
refuses llmc/core/planted.h '#include "core/planted.hpp" // "core/check.h"' 'there is no llmc/core/planted.hpp'
refuses train_gpt.cu '#include "comm/comm_host.h"' 'the transports are private'
refuses llmc/ops/planted.h '#  include "comm/mesh_that_is_not_there.h"' 'there is no llmc/comm/mesh_that_is_not_there.h'
refuses llmc/model/planted.h '#include "../core/check.h"' 'make it relative to llmc/'
refuses llmc/core/planted.h '#include "check.h"' 'there is no llmc/check.h'
refuses llmc/train/planted.h '#include <vector>' 'include of <vector>: include "core/std.h"'
refuses llmc/attic/planted.h '// a header' 'llmc/attic is not a floor'
refuses llmc/model/planted.h '#ifdef __CUDACC__' 'an #if on __CUDACC__'
refuses llmc/train/planted.h '#elif defined(TRAIN_GPT_MPI)' 'an #if on TRAIN_GPT_MPI'
refuses llmc/train/planted.h $'#if 1 || \\\n    __CUDA_ARCH__ >= 900' 'an #if on __CUDA_ARCH__'
refuses llmc/train/planted.h '#include <cuda_runtime.h>' 'include of cuda_runtime.h'
refuses llmc/comm/planted.h '#include <mpi.h>' 'include of mpi.h'
refuses train_gpt.cu '#include "nccl.h"' 'include of nccl.h'
refuses llmc/ops/cuda/planted.cuh '__global__ void planted_kernel(float* x) {}' 'a kernel that is not a template'
refuses llmc/ops/cuda/planted.cuh $'template <>\n__global__ void kernel<1>() {}' 'a kernel that is not a template'
refuses llmc/ops/cuda/planted.cuh $'template <int>\nvoid f() {}\n__global__ void kernel() {}' 'a kernel that is not a template'

# rejects EXPECTED: the tree in $copy/tree is refused with this.
rejects() {
  ! output=$(scripts/check_floors.sh "$copy/tree") || fail "a tree passed that should have been refused with: $1"
  [[ $output == *"$1"* ]] || fail "expected '$1', found: $output"
}
rm -rf "$copy/tree" && mkdir "$copy/tree" && cp -r llmc train_gpt.cu "$copy/tree"
for i in {1..601}; do echo "// line $i"; done >"$copy/tree/llmc/core/planted.h"
rejects 'llmc/core/planted.h:601: more than 600 lines'
rm "$copy/tree/llmc/core/planted.h"
echo '#include "core/planted_b.h"' >"$copy/tree/llmc/core/planted_a.h"
echo '#include "core/planted_a.h"' >"$copy/tree/llmc/core/planted_b.h"
rejects 'core/planted_a.h'
rm "$copy/tree/llmc/core/planted_"*
for i in {1..41}; do echo '// a header' >"$copy/tree/llmc/data/planted$i.h"; done
rejects 'files in a folder, more than 40'

# ---- Headers ---------------------------------------------------------------------------------------------------------

# Those of a chain: c.h includes b.h, which includes a.h.
rm -rf "$copy/tree" && mkdir -p "$copy/tree/"{scripts,test,llmc/core,llmc/run/options}
cp scripts/check_headers.sh "$copy/tree/scripts"
echo '#include <cstdint>' | tee "$copy/tree/test/pch.h" >"$copy/tree/llmc/run/options/parse.h"

# header NAME LINE...
header() { printf '%s\n' '#pragma once' "${@:2}" >"$copy/tree/llmc/core/$1"; }
chain() {
  header a.h 'inline int a() { return 1; }'
  header b.h '#include "core/a.h"' 'inline int b() { return a(); }'
  header c.h '#include "core/b.h"' 'inline int c() { return b(); }'
}
headers() { FLAGS='-std=c++20 -Wall -Illmc' "$copy/tree/scripts/check_headers.sh" llmc/core/{a,b,c}.h 2>&1; }
chain
said=$(headers) || fail "three headers are refused: $said"

# unfit NAME LINE...: this header is named, and no other
unfit() {
  ! said=$(headers) || fail "passes: $*"
  [[ $said = *"llmc/core/$1:1: does not compile"* ]] || fail "it does not name $1: $said"
  [ "$(grep -c 'does not compile' <<<"$said")" = 1 ] || fail "more than $1 is refused: $said"
  chain
}
header b.h 'inline int b() { return a(); }' && header c.h '#include "core/a.h"' '#include "core/b.h"'
unfit b.h
header b.h '#ifdef A' '#include "core/a.h"' '#endif' 'inline int b() { return a(); }' && header c.h
unfit b.h
sed -i 1d "$copy/tree/llmc/core/c.h"
unfit c.h
header b.h 'inline int b() { return 1; }' && header a.h 'inline int a() { return b(); }' && header c.h
unfit a.h
header a.h 'inline int a() { int unused; return 1; }' && header b.h && header c.h
unfit a.h
# Those that include run/setup.h: one lacks what one before it has, and one what one behind it has.
header ../run/setup.h
for names in 'x y' 'y x'; do
  read -r whole unfit <<<"$names"
  header "../run/$whole.h" '#include "run/setup.h"' 'inline int f() { return 1; }'
  header "../run/$unfit.h" '#include "run/setup.h"' 'inline int g() { return f(); }'
  ! said=$(FLAGS='-std=c++20 -Wall -Illmc' "$copy/tree/scripts/check_headers.sh" llmc/run/{setup,x,y}.h 2>&1) ||
    fail "run/$unfit.h passes without run/$whole.h"
  [[ $said = *"llmc/run/$unfit.h:1: does not compile"* && $said != *"llmc/run/$whole.h:1: "* ]] || fail "$unfit: $said"
done

# ---- Scripts ---------------------------------------------------------------------------------------------------------

checked() { # STATUS LINE
  local status=0
  echo "$2" >"$copy/planted.sh"
  scripts/check_shell.sh "$copy/planted.sh" >"$copy/said" || status=$?
  [ $status = "$1" ] || fail "status $status, expected $1: $2"
  [ "$1" = 0 ] || grep -qF "planted.sh:1:$2" "$copy/said" || fail "it does not name the line: $2"
}
for reader in 'head -n 1' 'grep -q y' 'grep -aqx y' 'grep -m1 y' 'grep -i --quiet y' 'LC_ALL=C head' 'sed 1q' "sed -n '/y/{p;q}'" \
  "awk '{ print; exit }'"; do
  checked 1 "x | $reader"
  checked 1 "x 2>&1 |& $reader"
done
checked 0 'x | sed -n 1,6p'
checked 0 'x || grep -q y file'
checked 0 'x | grep -v foo-q'
checked 0 'grep -q y <<<text'
checked 0 'x | header'
here="\"\$(dirname \"\$0\")/..\""
for cd in "cd $here" "root=\$(cd $here && pwd)" "true && cd $here"; do
  checked 1 "$cd"
  checked 0 "${cd/cd/CDPATH=\'\' cd}"
done

# ---- build/config.mk -------------------------------------------------------------------------------------------------

# What it says of these parts when they have a value elsewhere; none is there under this name.
names=(GPU GPU_ARCH NCCL_VERSION NCCL_FAULT CUDNN_LIBS MPI_VERSION PYTHON_VERSION)
# shellcheck disable=SC2016    # make expands it
values() { # ARGUMENT...: of make
  env -u MAKEFLAGS -u MFLAGS "${names[@]/%/=planted}" make --no-print-directory -f - "$@" <<MAKE
include build/config.mk
all:
	@echo '$(printf '$(%s) ' "${names[@]}")'
MAKE
}
[[ $(values) != *planted* ]] || fail "build/config.mk has values of the environment: $(values)"
[[ $(values NCCL_VERSION=planted) = *planted* ]] || fail "make's command line does not override build/config.mk"
