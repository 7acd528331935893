#!/usr/bin/env bash
# The resources of each kernel as reported by ptxas: registers per thread, static shared memory per block, stack and
# register spills in bytes per thread; and from its PTX, in bytes, the widest load from global memory and the widest
# store. Writes a table; fails if a kernel spills that should not spill.
#
#   dev/cuda/kernel_resources.sh [OUTPUT]     default: dev/results/kernel-resources-$ARCH.md
#
# Environment: ARCH=sm_90  NVCC=nvcc  CXX=g++
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
arch=${ARCH:-sm_90} nvcc=${NVCC:-nvcc} output=${1:-}
: "${output:=dev/results/kernel-resources-$arch.md}"

case $arch in
  sm_90 | sm_90a) flags=('-gencode=arch=compute_90a,code=sm_90a' -DTRAIN_GPT_WGMMA) ;;   # as in the Makefile
  *) flags=(-arch="$arch") ;;
esac
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
report=$dir/report
"$nvcc" -x cu -std=c++20 --expt-relaxed-constexpr -Illmc "${flags[@]}" -ccbin "${CXX:-g++}" -Xptxas -v -cubin \
  --keep --keep-dir "$dir" test/cuda/all_kernels.cu -o /dev/null 2>"$report" || { cat "$report" >&2; exit 1; }
# One line "Widths of 'KERNEL': LOAD STORE" per kernel, from instructions such as ld.global.nc.v4.u32 and cp.async.
awk '
  function bytes(instruction) {
    match(instruction, /\.[busf][0-9]+$/)
    width = substr(instruction, RSTART + 2) / 8
    return instruction ~ /\.v4\./ ? 4 * width : instruction ~ /\.v2\./ ? 2 * width : width
  }
  / \.entry / { name = $0; sub(/.*\.entry /, "", name); sub(/\(.*/, "", name); load = store = 0 }
  /cp\.async\.c[ag]\.shared\.global/ { width = $4 + 0; load = width > load ? width : load }   # to, from, width
  match($0, /(ld|st)\.global[a-z0-9._]*\.[busf][0-9]+/) {
    instruction = substr($0, RSTART, RLENGTH)
    width = bytes(instruction)
    if (instruction ~ /^ld/) load = width > load ? width : load
    else store = width > store ? width : store
  }
  /^}/ && name != "" { printf "Widths of \x27%s\x27: %d %d\n", name, load, store; name = "" }
' "$dir/all_kernels.ptx" >"$dir/widths"

# ptxas prints 3 lines per kernel: name, "N bytes stack frame, N bytes spill stores, ...", "Used N registers, ...".
{
  echo "# Registers, shared memory and spills of every kernel"
  echo
  echo "$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/nvcc \1/p'), $arch; made by \`dev/cuda/kernel_resources.sh\`." \
    "Dynamic shared memory, set at launch, is not included. Of a thread's loads from global memory and stores to it," \
    "the widest, in bytes."
  echo
  echo "| kernel | registers | shared bytes | widest load | widest store | stack bytes | spilled bytes |"
  echo "| --- | --- | --- | --- | --- | --- | --- |"
  cat "$dir/widths" "$report" | c++filt | awk '
    /^Widths of/ { of = $0; gsub(/^[^\x27]*\x27|\x27:[^\x27]*$/, "", of); loads[of] = $(NF - 1); stores[of] = $NF }
    /Compiling entry function/ {
      sub(/^[^\x27]*\x27/, ""); sub(/\x27 for \x27sm_[0-9a-z]+\x27.*/, "")
      name = $0
    }
    /bytes stack frame/ { stack = $1; spilled = $5 + $9 }
    /Used [0-9]+ registers/ {
      match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
      shared = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH - 11) : 0
      load = loads[name]; store = stores[name]
      sub(/^void /, "", name); gsub(/llmc::cuda::detail::|llmc::cuda::|llmc::/, "", name)
      depth = 0   # the parameters begin at the last parenthesis outside <>
      for (i = 1; i <= length(name); ++i) {
        c = substr(name, i, 1)
        if (c == "<") ++depth
        if (c == ">") --depth
        if (c == "(" && depth == 0) { name = substr(name, 1, i - 1); break }
      }
      printf "| %s | %d | %d | %d | %d | %d | %d |\n", name, registers, shared, load, store, stack, spilled
    }' | LC_ALL=C sort
} >"$output"
echo "$output: $(grep -c '^| .* | [0-9]' "$output") kernels"
# Attention's backward keeps two accumulators of D columns per key: with D = 256 they exceed a thread's 255 registers,
# and with D = 64, with twice as many keys per warp, by a few. Its kernels for warpgroups spill a few, too: more blocks
# at a time were measured to be faster. So do those that read heads element by element (Copy 1), which no preset needs,
# and the one of dQ with D = 128, by two registers. No other kernel may spill.
if grep -v -e ' | 0 |$' -e '^| attention_backward_keys_kernel<' -e '^| attention_backward_[a-z]*_wgmma_kernel<' \
  -e '^| attention_backward_.*(Copy)1> ' -e '^| attention_backward_queries_kernel<bf16, BackwardQueriesBlock<bf16, 128>' \
  "$output" | grep '| [0-9]* |$'; then
  echo "kernel_resources.sh: these kernels spill registers" >&2
  exit 1
fi
