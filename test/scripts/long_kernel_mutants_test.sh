#!/usr/bin/env bash
# Do the tests of the CUDA kernels notice a wrong bound, offset, stride or index? mutate.awk plants one at every such
# place in the kernels' sources, all in one build, where MUTANT=N enables number N. On the emulator, under the
# sanitizers, a test must then fail, except for those listed in test/cuda/mutants/surviving_mutants.txt, each with the reason
# why no test can: that list must be exact.
#
#   test/scripts/long_kernel_mutants_test.sh [TEST...]     TEST: attention, layernorm, ...: only the sources of these tests
#
# Environment: MUTANTS=8 tries about every 8th, always the same ones; 1 all, which takes hours. JOBS, CXX, CPPFLAGS,
# CXXFLAGS, LDFLAGS as for make, which builds what is needed in build/. The mutants are built in a temporary directory.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
fail() {
  echo "long_kernel_mutants_test: $1" >&2
  exit 1
}

# Tests, and the sources in which one of them must notice every mutant.
groups='update: update
attention attention_blocks: attention_backward attention_forward attention_rows attention_tiles
column_sum elementwise layernorm rmsnorm swiglu: column_sum norms rows
elementwise swiglu cross_entropy foundations embedding: elementwise swiglu cross_entropy reduce vec
embedding: embedding sort
experts grouped_matmul: experts grouped_matmul
expert_ranks: expert_ranks
qk_norm: heads projection_norm
quantise swiglu: quantise
router: router
step: step'
export every=${MUTANTS:-8} compiler=${CXX:-g++}
jobs=${JOBS:-$(nproc)}

scratch=$(mktemp -d)
export scratch libraries
trap 'rm -rf "$scratch"' EXIT
emulator=(build/test/main.o)
for source in test/cuda_on_cpu/*.cpp test/cuda_on_cpu/*/*.cpp; do emulator+=("build/asan/${source%.cpp}.o"); done
make -s "${emulator[@]}"
libraries="${emulator[*]} $(sed -n 's/^CATCH2_LIBS *:= *//p' build/config.mk) -lboost_context -ldl"

# Samples the lines "N<tab>FILE: text" of standard input by a hash of their text: adding lines changes no choice.
sample() {
  awk -F'\t' -v every="$every" '
    BEGIN { for (i = 32; i < 127; ++i) code[sprintf("%c", i)] = i }
    { hash = 0; for (i = 1; i <= length($2); ++i) hash = (hash * 31 + code[substr($2, i, 1)]) % 65521 }
    hash % every == 0'
}

# build NAME TESTS SOURCES: builds the program $scratch/NAME of these tests, and NAME.list, the mutants to try.
build() {
  set -euo pipefail
  local name=$1 tree=$scratch/$1.tree source test objects=()
  mkdir "$tree" && cp -r llmc "$tree"
  : >"$tree/all"
  for source in $3; do
    awk -v file="$source.cuh" -v first=$(($(wc -l <"$tree/all") + 1)) -v list="$tree/new" -f test/cuda/mutants/mutate.awk \
      "llmc/ops/cuda/$source.cuh" >"$tree/llmc/ops/cuda/$source.cuh"
    cat "$tree/new" >>"$tree/all"
  done
  sample <"$tree/all" >"$scratch/$name.list"
  # shellcheck disable=SC2086   # flags are words
  for test in $2; do
    $compiler -std=c++20 -O1 -march=native -fsanitize=address,undefined -fno-sanitize-recover=undefined \
      -fno-strict-aliasing -w -DTRAIN_GPT_CUDA -include test/cuda/mutants/mutants.h -I"$tree/llmc" -Itest \
      -Itest/cuda_on_cpu \
      ${CPPFLAGS:-} ${CXXFLAGS:-} -c "$(find test/cuda -name "test_$test.cpp")" -o "$tree/$test.o"
    objects+=("$tree/$test.o")
  done
  # shellcheck disable=SC2086
  $compiler -fsanitize=address,undefined -fopenmp -rdynamic -Wl,--sort-section=name "${objects[@]}" -o "$scratch/$name" \
    ${LDFLAGS:-} $libraries
}

# run NAME NUMBER: prints "killed NUMBER" or "survived NUMBER". Tries one schedule, then all if that does not notice it.
# A mutant may make a kernel loop forever. Tests of barriers are left out: they check something else.
passes() {
  timeout --kill-after=5 "$limit" "$scratch/$1" --abort '~[.]~*barrier*' </dev/null >"$scratch/$1.$MUTANT.log" 2>&1
}
run() {
  export MUTANT=$2
  if ONE_SCHEDULE=1 passes "$1" && passes "$1"; then echo "survived $2"; else echo "killed $2"; fi
}
export -f sample build passes run
export ASAN_OPTIONS=symbolize=0:detect_leaks=0 OMP_NUM_THREADS=1

chosen=$scratch/chosen   # NAME:TESTS:SOURCES
for test in "${@:-.}"; do
  grep -E "^([^:]* )?$test" <<<"$groups" || fail "unknown test '$test'"
done | sort -u | sed 's/: /:/; h; s/:.*//; s/ /_/g; G; s/\n/:/' >"$chosen"
echo "long_kernel_mutants_test: building $(wc -l <"$chosen") test programs, $jobs at a time"
tr ':\n' '\0\0' <"$chosen" | xargs -0 -n 3 -P "$jobs" bash -c 'build "$@"' build

names=$(cut -d : -f 1 "$chosen")
total=$(for name in $names; do cat "$scratch/$name.list"; done | wc -l)
tried=0 killed=0 begin=$SECONDS
for name in $names; do
  start=$SECONDS
  export limit=600   # seconds
  [ "$(run "$name" none)" = 'survived none' ] ||
    fail "the tests fail without a mutant: $(tail -n 20 "$scratch/$name.none.log")"
  limit=$((20 + 10 * (SECONDS - start)))
  cut -f 1 "$scratch/$name.list" | xargs -P "$jobs" -I{} bash -c 'run "$@"' run "$name" {} >"$scratch/$name.fates"
  awk -F'[ \t]' 'NR == FNR { lives[$2] = $1 == "survived"; next } lives[$1]' "$scratch/$name.fates" \
    "$scratch/$name.list" >>"$scratch/survivors"
  all=$(wc -l <"$scratch/$name.fates") dead=$(grep -c ^killed "$scratch/$name.fates" || true)
  tried=$((tried + all)) killed=$((killed + dead)) spent=$((SECONDS - begin))
  echo "  $name: $all mutants, $dead killed; $tried of $total in $spent s," \
    "about $((spent * (total - tried) / (tried + 1))) s to go"
done
echo "$tried mutants, $killed killed"

# Against the list: "FILE: text  // reason".
export LC_ALL=C
texts() { cut -f 2 "$@" | sort -u; }
sed '/^#/d; s,  *// .*,,' test/cuda/mutants/surviving_mutants.txt | sort -u >"$scratch/named"
texts "$scratch/survivors" >"$scratch/survived"
unseen=$(comm -23 "$scratch/survived" "$scratch/named")
killed_but_named=$(texts "$scratch"/*.list | comm -12 - "$scratch/named" | comm -23 - "$scratch/survived")
gone=$([ $# -gt 0 ] || texts "$scratch"/*.tree/all | comm -13 - "$scratch/named")
complain() { [ -z "$2" ] || echo "long_kernel_mutants_test: $1:"$'\n'"$2" >&2; }
complain 'no test notices; better a test, else name it in test/cuda/mutants/surviving_mutants.txt' "$unseen"
complain 'test/cuda/mutants/surviving_mutants.txt names what a test notices; delete the line' "$killed_but_named"
complain 'test/cuda/mutants/surviving_mutants.txt names what is not in the sources any more; delete the line' "$gone"
[ -z "$unseen$killed_but_named$gone" ] || exit 1
echo "long_kernel_mutants_test: ok"
