#!/usr/bin/env bash
# The trainer and the tests of its ops for 64-bit ARM: compiled here, run by qemu. It trains in fp32 and bf16, on one
# rank and on two, to the losses of this machine with plain vectors, and each resumes from the other's checkpoints.
#
# Takes root and a network, for a folder with Debian's libraries for arm64 (debootstrap), which stays in build/aarch64.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 XDG_CACHE_HOME=$PWD/build/aarch64/cache   # peaks under qemu are no peaks

not_tried() {
  echo "long_aarch64_test: not tried: $*"
  exit 77
}
fail() {
  echo "long_aarch64_test: $*" >&2
  exit 1
}
[ "$(uname -m)" = x86_64 ] || not_tried "this machine is $(uname -m)"
[ "$(id -u)" -eq 0 ] || not_tried "debootstrap takes root"
command -v apt-get >/dev/null || not_tried 'the libraries for arm64 are those of Debian'
scripts/install_deps.sh --if-needed arm || not_tried 'it takes a cross compiler, qemu-aarch64 and debootstrap'

build=$PWD/build/aarch64
root=$build/root
mkdir -p "$build"
# Only unpacked: no program in it is run.
packages=libxxhash-dev,libssl-dev,zlib1g-dev,libzstd-dev,libtomlplusplus-dev,libgomp1,libstdc++6,libcli11-dev
packages+=,nlohmann-json3-dev,catch2
if [ "$(cat "$root/unpacked" 2>/dev/null)" != "$packages" ]; then
  # shellcheck source=/dev/null
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [ -n "$suite" ] || not_tried 'this Debian has no name in /etc/os-release'
  mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' "Codename: $suite" | sed -n 1p)
  rm -rf --one-file-system "$root"
  debootstrap --foreign --arch=arm64 --variant=minbase --include="$packages" "$suite" "$root" "$mirror" \
    >"$build/debootstrap.log" 2>&1 || not_tried "debootstrap failed, see $build/debootstrap.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  echo "$packages" >"$root/unpacked"
fi

compiled() { # OUT FLAGS... SOURCE...
  local out=$1
  shift
  aarch64-linux-gnu-g++ -std=c++20 -Illmc -Itest -I. -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wextra -Werror \
    -idirafter "$root/usr/include" -idirafter "$root/usr/include/aarch64-linux-gnu" "$@" -o "$build/$out" \
    >"$build/compiler.log" 2>&1 || fail "$out does not compile: $(head -n 20 "$build/compiler.log")"
}
objects=() libraries=(-L"$root/usr/lib/aarch64-linux-gnu" -lxxhash -lcrypto -lz -lzstd -ldl)
for set in portable stand_ins; do
  compiled $set.o -O3 -c llmc/ops/cpu/sets/$set.cpp
  objects+=("-Xlinker" "$build/$set.o")
done
compiled toml.o -O1 -c llmc/core/toml.cpp
objects+=("-Xlinker" "$build/toml.o")
compiled train_gpt -O2 -x c++ train_gpt.cu "${objects[@]}" "${libraries[@]}"
catch2=()
[ ! -e "$root/usr/include/catch2/catch_all.hpp" ] || catch2=(-lCatch2)   # 3 has a library
scripts/join_tests.sh test/ops/test_*.cpp >"$build/ops.cpp"
compiled main.o -O0 -c test/main.cpp
compiled ops -Og -x c++ "$build/ops.cpp" -Xlinker "$build/main.o" "${objects[@]}" "${catch2[@]}" "${libraries[@]}"

arm() { qemu-aarch64 -L "$root" "$build/$1" "${@:2}"; }
here() { TRAIN_GPT_CPU_ISA=portable ./train_gpt "$@"; }
[ "$(od -An -t u2 -j 18 -N 2 "$build/train_gpt" | tr -d ' ')" = 183 ] || fail 'train_gpt is no program for aarch64'
arm ops '~[long]~[.]' >"$build/ops.log" 2>&1 || fail "tests of ops fail: $(tail -n 40 "$build/ops.log")"

# The same numbers up to rounding: another processor's fused operations and library functions differ in the last digits.
python=$(scripts/find_python.sh)
"$python" - "$build/tokens.bin" <<'PYTHON'
import struct, sys
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, 4000, *[0] * 253))
    file.write(struct.pack("<4000H", *(i * i * 7919 % 257 for i in range(4000))))
PYTHON
losses() { sed -n 's/.*"loss": *\([^,]*\),.*/\1/p' "$1/metrics.jsonl"; }
same() { # WHAT BOUND: the six losses of "$build/arm" and "$build/here" differ by at most as much, relatively
  paste <(losses "$build/arm") <(losses "$build/here") | awk -v bound="$2" '
    { d = $1 / $2 - 1; if (d < 0) d = -d; if (!(d <= bound)) bad = $0 }
    END { if (bad != "" || NR != 6) { print NR " steps; " bad; exit 1 } }' || fail "$1: the losses differ by more than $2"
}
for dtype in fp32 bf16; do
  for more in "--local-ranks 1" "--local-ranks 2 --zero-stage 3" "--local-ranks 2 --tp 2" \
    "--local-ranks 1 --model qwen3:0.6B --n-layer 2 --n-embd 64 --n-head 4 --n-kv-head 2 --n-ffn 96"; do
    rm -rf "$build/arm" "$build/here"
    # shellcheck disable=SC2206    # words
    line=(-i "$build/tokens.bin" --model d2 --n-embd 64 --n-head 4 --vocab-size 257 --dtype $dtype --threads 1
      -b 4 -t 32 -x 6 --checkpoint-every 3 $more)
    arm train_gpt "${line[@]}" -o "$build/arm" >"$build/run.log" 2>&1 || fail "$dtype $more: $(tail -n 5 "$build/run.log")"
    here "${line[@]}" -o "$build/here" >"$build/run.log" 2>&1 || fail "$dtype $more: $(tail -n 5 "$build/run.log")"
    bound=$([ $dtype = fp32 ] && echo 1e-5 || echo 1e-3)
    same "$dtype $more" "$bound"
    rm -r "$build"/{arm,here}/step-*6
    here "${line[@]}" -o "$build/arm" >"$build/run.log" 2>&1 || fail "$dtype $more, resumed here: $(tail -n 5 "$build/run.log")"
    grep -q 'instructions of portable on aarch64, and the run goes on with those of portable:' "$build/run.log" ||
      fail "not a word of other instructions: $(<"$build/run.log")"
    arm train_gpt "${line[@]}" -o "$build/here" >"$build/run.log" 2>&1 || fail "$dtype $more, resumed: $(tail -n 5 "$build/run.log")"
    grep -q 'instructions of portable, and the run goes on with those of portable on aarch64:' "$build/run.log" ||
      fail "not a word of other instructions: $(<"$build/run.log")"
    same "$dtype $more, each resumed by the other" "$bound"
  done
done
arm train_gpt --selftest --local-ranks 2 >"$build/selftest.log" 2>&1 || fail "the self-test: $(tail -n 40 "$build/selftest.log")"
echo "long_aarch64_test: ok: ops, 8 runs, 16 resumed ones, $(tail -n 1 "$build/selftest.log")"
