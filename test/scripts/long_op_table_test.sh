#!/usr/bin/env bash
# The op table, dev/bench/cuda/op_table.cu, on the emulated GPU at tiny sizes: it compiles without warnings, times every
# op of a planned step except the scalar ones, and covers all of the step's flops.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# shellcheck disable=SC2206    # lists of words
flags=(-std=c++20 -O1 -DTRAIN_GPT_CUDA -Illmc -Itest -Itest/cuda_on_cpu -Wall -Wextra -Wno-unknown-pragmas
  -Wno-unused-parameter -Wno-restrict -fno-strict-aliasing ${CPPFLAGS:-} ${CXXFLAGS:-})
# shellcheck disable=SC2086
${CXX:-g++} "${flags[@]}" -Werror -fopenmp -rdynamic test/cuda_on_cpu/*.cpp test/cuda_on_cpu/*/*.cpp \
  llmc/ops/cpu/sets/{portable,stand_ins}.cpp -x c++ dev/bench/cuda/op_table.cu -x none \
  -o "$dir/op_table" ${LDFLAGS:-} -lboost_context -lxxhash -lcrypto -lz -lzstd -ldl

models=(d1 test/golden/families/qwen2_tiny test/golden/families/qwen3_tiny test/golden/experts/qwen3_moe_tiny)
"$dir/op_table" --models "${models[@]}" -b 1 -t 16 --repeats 1 --peak-size 64 --copy-mib 1 --flush-mib 1 \
  --long-sequence 32 --json "$dir/rows" >"$dir/table"
fail() {
  cat "$dir/table"
  echo "$0: $*"
  exit 1
}
whole='The table has 100.0% of the flops .* it lacks add_losses add_row_sums clip_control combine_scalars$'
[ "$(grep -c "$whole" "$dir/table")" -eq ${#models[@]} ] || fail 'a table lacks ops, or flops, of a planned step'
# In fp8, of a model whose sizes admit it, with an activation that writes it.
mkdir "$dir/model"
sed -E 's/("hidden_size": )[0-9]+/\132/; s/("intermediate_size": )[0-9]+/\1128/' test/golden/families/qwen2_tiny/config.json \
  >"$dir/model/config.json"
"$dir/op_table" --fp8 --models "$dir/model" -b 1 -t 128 --repeats 1 --peak-size 64 --copy-mib 1 \
  --flush-mib 1 --long-sequence 0 >"$dir/fp8"
grep -q "$whole" "$dir/fp8" || { cat "$dir/fp8" && fail 'a table in fp8 lacks ops, or flops, of a planned step'; }
[ "$(grep -c '^| [a-z]' "$dir/table")" -eq $(($(wc -l <"$dir/rows") + ${#models[@]} + 1)) ] ||
  fail 'the table and --json have different numbers of rows'
! grep -E '\| (-?nan|inf|-[0-9])' "$dir/table" || fail 'a time is not a number'
