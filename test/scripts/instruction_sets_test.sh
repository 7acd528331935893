#!/usr/bin/env bash
# One program for all processors: outside of the ops compiled for AVX2, AVX-512 and AMX it has no instruction that a
# processor may lack; and the ops and layouts are right with lesser instruction sets, and with the stand-ins for better
# ones.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=passive
fail() {
  echo "instruction_sets_test: $*" >&2
  exit 1
}

if [ "$(uname -m)" = x86_64 ]; then
  # Instructions that begin with v, or use wide vector, matrix or mask registers.
  stray=$(objdump -d --no-show-raw-insn -C train_gpt | awk '
    /^[0-9a-f]+ </ { name = $0 }
    /\tv[a-z]|%[yz]mm|%tmm|%k[0-7]/ { if (name !~ /cpu::(avx2|avx512|avx512_pairs|amx)::|_with_fma\(/ && !seen[name]++) print name }')
  [ -z "$stray" ] || fail "not every processor has the instructions of: $stray"
  # g++ inlines nothing into the ops of a set whose pragma also names an architecture or a tune=: then a loop calls
  # store() for every element, and no set is to have its own copy of a function that others use.
  for set in avx2 avx512 avx512_pairs amx; do
    shared=$(nm -C build/cpu/$set.o | sed -n 's/^[0-9a-f]* W //p' | grep -v "cpu::$set::" || true)
    [ -z "$shared" ] || fail "$set.o calls functions of all sets instead of inlining them: $shared"
  done
fi

# Flags for one processor are for everything else: with them, a set would round differently under the same name.
flags=$(make -s --eval="printed: ; @echo \$(CPU_OPS_FLAGS)" ARCH_FLAGS='-march=haswell -mtune=intel' printed)
[[ $flags == *-fopenmp* && $flags != *haswell* && $flags != *intel* ]] ||
  fail "with ARCH_FLAGS the CPU's ops are compiled with $flags"

# Stand-ins for what this processor lacks; what it has is faster, and its best set is that of all other tests.
best=$(./train_gpt --version | sed -n 's/^matmul: our own, for \([^ ]*\).*/\1/p')
[ -n "$best" ] || fail "--version does not name the best set: $(./train_gpt --version)"
sets=(avx2 portable)
case ${LONG:+long}$best in
  amx) sets+=(avx512-bf16) ;;
  avx512-bf16) sets+=(amx-stand-in) ;;
  *) sets+=(avx512-bf16-stand-in amx-stand-in) ;;
esac
for isa in "${sets[@]}"; do
  [ "$isa" != "$best" ] || continue
  [ "$isa" != avx2 ] || [ "$best" != portable ] || continue
  [ "$isa" = portable ] || TRAIN_GPT_CPU_ISA=$isa build/test/ops '~[long]~[.]' >build/instructions.log 2>&1 ||
    fail "test/ops fails with $isa: $(tail -n 40 build/instructions.log)"
  [ "$isa" = avx2 ] || [ -n "${LONG:-}" ] || continue
  case $isa in   # models in fp32 and bf16, and layouts of each; stand-ins are slow
    *stand-in) compared=(--selftest-draws 0-4) ;;
    *) compared=(--selftest-draws 0-39) ;;
  esac
  [ -z "${LONG:-}" ] || compared=(--selftest-layouts all)
  TRAIN_GPT_CPU_ISA=$isa ./train_gpt --selftest --local-ranks 2 "${compared[@]}" >build/instructions.log 2>&1 ||
    fail "the self-test fails with $isa: $(tail -n 40 build/instructions.log)"
done

# Two processes whose processors differ say so, not that their builds differ.
meeting=$(mktemp -d)
trap 'rm -rf "$meeting"' EXIT
for rank in 0 1; do
  isa=$([ $rank = 0 ] && echo portable || echo amx-stand-in)
  ! TRAIN_GPT_CPU_ISA=$isa ./train_gpt --selftest --world-size 2 --rank $rank --init-timeout 60 \
    --rendezvous "file:$meeting/place" >"$meeting/$rank.log" 2>&1 &
done
wait
here=$([ "$(uname -m)" = x86_64 ] || echo " on $(uname -m)")
grep -q "^train_gpt: --cpu-isa differs: portable$here on rank 0, amx-stand-in$here on rank 1" "$meeting/0.log" ||
  fail "processes with other instructions: $(cat "$meeting"/*.log)"

# What would otherwise be a segmentation fault in the first op.
! said=$(OMP_STACKSIZE=16 ./train_gpt --version 2>&1) || fail "OMP_STACKSIZE=16 is taken: $said"
[[ $said == *"OMP_STACKSIZE 16: a thread needs 64 KiB at least"* ]] || fail "OMP_STACKSIZE=16 says: $said"
