#!/usr/bin/env bash
# Do the tests notice wrong scales of numbers in fp8? Plants bugs in a copy of the sources, each switched on by an
# environment variable: E5M2 scaled to 448 as if it were E4M3; largest numbers, scales and weights of before, as if they
# were a history; scales along the wrong axis. For each, a test must fail: on the CPU, and on emulated GPUs.
#
#   test/scripts/long_fp8_bugs_test.sh
#
# Environment: JOBS; CXX, CPPFLAGS, CXXFLAGS, LDFLAGS as for make. All is built in a temporary directory, in minutes.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
fail() {
  echo "long_fp8_bugs_test: $1" >&2
  exit 1
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The sources, and of the tests those that are about fp8.
tree=$scratch/tree
mkdir "$tree"
git ls-files -z | xargs -0 cp --parents -t "$tree"
find "$tree/test" -name 'test_*.cpp' ! -path "$tree/test/ops/test_quantise.cpp" \
  ! -path "$tree/test/parallel/test_fp8_layouts.cpp" ! -path "$tree/test/cuda/test_quantise.cpp" \
  ! -path "$tree/test/cuda/trainer/test_trainer_fp8.cpp" -delete
{ cat && sed '/^#pragma once/d' test/cuda/mutants/mutants.h; } >"$tree/llmc/core/bugs.h" <<'HEADER'
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>

namespace mutants {

// `now` as it was when this place was last asked for; the first time as it is.
inline float history(float now, std::array<int64_t, 5> place) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 5>, float> last;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = last.try_emplace(place, now);
  const float before = found->second;
  found->second = now;
  return before;
}

}  // namespace mutants
HEADER

# bug FILE PROGRAMS NAME TEXT REPLACEMENT: plants it where TEXT is, as MUTANT(number). One of PROGRAMS must fail.
bugs=0 programs_of=() names=()
bug() {
  local file=$tree/llmc/$1 text
  bugs=$((bugs + 1)) programs_of[bugs]=$2 names[bugs]="$1: $3"
  text=$(cat "$file")
  [[ $text == *"$4"* ]] || fail "$1 has no '$4' any more: plant '$3' elsewhere"
  text=${text//"$4"/"${5//MUTANT/MUTANT($bugs)}"}
  [[ $text == *core/bugs.h* ]] || text=${text/'#pragma once'/$'#pragma once\n#include "core/bugs.h"'}
  printf '%s\n' "$text" >"$file"
}

# On the CPU. (A constant would be evaluated by the compiler, where MUTANT is 0.)
bug core/fp8.h ops 'E5M2 scaled to 448' \
  'constexpr uint32_t most = std::bit_cast<uint32_t>(F::largest), smallest' \
  'uint32_t most = std::bit_cast<uint32_t>(MUTANT ? Float8<4, 3, 0x7e>::largest : F::largest); constexpr uint32_t smallest'
sed -i 's/constexpr uint32_t binades = (most/const uint32_t binades = (most/' "$tree/llmc/core/fp8.h"
bug ops/cpu/quantise.h ops 'E5M2 scaled to 448 where it is rounded' \
  'scales[c] = fp8_scale<F>(std::bit_cast<float>(largest[c]))' \
  'scales[c] = MUTANT ? fp8_scale<e4m3>(std::bit_cast<float>(largest[c])) : fp8_scale<F>(std::bit_cast<float>(largest[c]))'
bug ops/cpu/quantise.h ops 'largest numbers of the operand before' \
  'factors[c] = reciprocal_of_power(scales[c]);' \
  'if (MUTANT) scales[c] = mutants::history(scales[c], {R, C, row, column + c, block.rows}); factors[c] = reciprocal_of_power(scales[c]);'
bug ops/ops_quantise.h 'ops' 'scales along the other axis' \
  'return sum == SumAlong::rows ?' 'return (sum == SumAlong::rows) != MUTANT ?'
bug ops/cpu/quantise.h ops 'scales of another column' \
  'F::rounded(static_cast<float>(x[at + c]) * factors[c]) * scales[c]' \
  'F::rounded(static_cast<float>(x[at + c]) * factors[MUTANT ? columns - 1 - c : c]) * scales[MUTANT ? columns - 1 - c : c]'
bug shard/fp8_weights.h 'layouts gpus' 'weights before the update' \
  'k.outdated |= k.is_in(weights)' 'k.outdated |= !MUTANT && k.is_in(weights)'
bug shard/gathered_weights.h 'layouts gpus' 'shards before the update' \
  'void weights_changed() { outdated_ = true; }' 'void weights_changed() { outdated_ |= !MUTANT; }'
# Powers of two hardly differ from one update to the next: as if weights had been a sixteenth.
bug shard/gathered_weights.h 'layouts gpus' 'scales of shards before an update that made them larger' \
  'detail::scales_of_ranks(scales_, all, stream);' \
  'detail::scales_of_ranks(scales_, all, stream); if (MUTANT) scale(scales_, 1.0f / 16, stream);'
# On GPUs.
bug ops/cuda/quantise.cuh kernels 'E5M2 scaled to 448 where rows are rounded' \
  'fp8_scale<F>(largest[width == fp8_block ? 0 : i])' \
  '(MUTANT ? fp8_scale<e4m3>(largest[width == fp8_block ? 0 : i]) : fp8_scale<F>(largest[width == fp8_block ? 0 : i]))'
bug ops/cuda/quantise.cuh kernels 'E5M2 scaled to 448 where columns are rounded' \
  'fp8_scale<F>(largest[0])' '(MUTANT ? fp8_scale<e4m3>(largest[0]) : fp8_scale<F>(largest[0]))'
bug ops/cuda/quantise.cuh kernels 'largest numbers of the operand before, in rows' \
  'const int64_t r = row + i * rows;
    if (r >= R || column >= C) continue;
    e4m3_pack(values.values, reciprocal_of_power(scale))' \
  'const int64_t r = row + i * rows;
    if (r >= R || column >= C) continue;
    if (MUTANT) scale = mutants::history(scale, {R, C, r, segment, lane});
    e4m3_pack(values.values, reciprocal_of_power(scale))'
sed -i '/quantise_rows_kernel/,/^}/s/const float scale = scale_of_row/float scale = scale_of_row/' \
  "$tree/llmc/ops/cuda/quantise.cuh"
bug ops/cuda/quantise.cuh kernels 'largest numbers of the operand before, in tiles' \
  ' scale = fp8_scale(largest[0]);' \
  ' scale = fp8_scale(largest[0]); if (MUTANT) scale = mutants::history(scale, {R, C, row, column, threadIdx.x});'
bug ops/cuda/quantise.cuh kernels 'largest numbers of the operand before, in columns' \
  'scale = fp8_scale(largest);' \
  'scale = fp8_scale(largest); if (MUTANT) scale = mutants::history(scale, {R, C, row, to, begin});'
bug ops/cuda/quantise.cuh kernels 'scales of rows turned' \
  'out.scales[segment * R + r] = scale' 'out.scales[MUTANT ? r * gridDim.y + segment : segment * R + r] = scale'
bug ops/cuda/quantise.cuh kernels 'scales of tiles turned' \
  'out.scales[blockIdx.y * padded(C) + blockIdx.x] = scale' \
  'out.scales[MUTANT ? blockIdx.x * gridDim.y + blockIdx.y : blockIdx.y * padded(C) + blockIdx.x] = scale'
bug ops/cuda/quantise.cuh kernels 'scales of columns turned' \
  'turned.scales[row / size * C + to] = scale' \
  'turned.scales[MUTANT ? to * gridDim.y + row / size : row / size * C + to] = scale'
bug ops/cuda/quantise.cuh kernels 'rounded along the other axis' \
  'if (block.rows == 1) {' 'if (MUTANT && block.rows * block.columns == fp8_block) block = {block.columns, block.rows}; if (block.rows == 1) {'

build() {
  make -s -C "$tree" -j "${JOBS:-$(nproc)}" DEVICE=cpu CXXFLAGS="${CXXFLAGS:-} -w" ISA_SETS='portable stand_ins' LADDERS= MPI_VERSION= "$1"
}
declare -A programs=([ops]=build/test/ops [layouts]=build/test/trainer [kernels]=build/emulated/kernels
  [gpus]=build/emulated/trainer)
for name in ops kernels layouts gpus; do build "${programs[$name]}" || fail "$name does not compile"; done

# fails PROGRAM BUG: does a test of it fail? One that hangs does.
fails() {
  ! (cd "$tree" && MUTANT=$2 OMP_NUM_THREADS=1 timeout --kill-after=5 600 "${programs[$1]}" --abort '~*barrier*' \
    </dev/null >"$scratch/log" 2>&1)
}
for name in "${!programs[@]}"; do fails "$name" 0 && fail "$name fails without a bug: $(tail -n 20 "$scratch/log")"; done
unseen=0
for ((b = 1; b <= bugs; ++b)); do
  for name in ${programs_of[b]}; do
    if fails "$name" "$b"; then echo "  caught by $name: ${names[b]}"
    else echo "  NOT caught by $name: ${names[b]}" && unseen=$((unseen + 1)); fi
  done
done
[ $unseen -eq 0 ] || fail "$unseen bugs are not noticed"
echo "long_fp8_bugs_test: ok, $bugs bugs"
