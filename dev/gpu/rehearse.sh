#!/usr/bin/env bash
# Rehearses dev/gpu/check.sh on a machine without a GPU, as root, in a bare Debian that debootstrap makes: it has make,
# g++ and Python, this machine's CUDA toolkit, and a copy of this tree with build/gpu-deps, at most 64 MiB together.
#
#   dev/gpu/rehearse.sh [build] [sitting-1] [sitting-2] [broken]      default: all of them
#
#   build       everything with nvcc, within the bare root
#   sitting-1, sitting-2   all parts, with programs for emulated GPUs in place of those built with nvcc
#   broken      all parts again, with programs that fail, are missing, or do not end: none stops the others
#
# From the environment: FOLDER=build/rehearsal, 4 GB; rm -rf when done. SUITE=bookworm. JOBS=processors
# MORE_SECONDS=8: times the limits of check.sh, which are for a GPU and 16 processors
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

folder=$(mkdir -p "${FOLDER:-build/rehearsal}" && CDPATH='' cd "${FOLDER:-build/rehearsal}" && pwd)
root=$folder/root tree=$folder/root/train_gpt JOBS=${JOBS:-$(nproc)}
export MORE_SECONDS=${MORE_SECONDS:-8}
say() { echo "rehearse: $*"; }
fail() {
  echo "rehearse: $*" >&2
  exit 1
}
acts=("$@")
[ $# -gt 0 ] || acts=(build sitting-1 sitting-2 broken)
for act in "${acts[@]}"; do
  case $act in build | sitting-1 | sitting-2 | broken) ;; *) fail "unknown act '$act'; use build sitting-1 sitting-2 broken" ;; esac
done
[ "$(id -u)" -eq 0 ] || fail 'it makes a file system, which takes root'
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
[ -x "$toolkit/bin/nvcc" ] || fail "no CUDA toolkit with nvcc was found: $nvcc"
# Mounts are visible to this script alone, and are gone when it ends.
[ -n "${REHEARSE_OWN_MOUNTS:-}" ] || REHEARSE_OWN_MOUNTS=yes exec unshare --mount dev/gpu/rehearse.sh "${acts[@]}"

if [ ! -e "$root/usr/bin/g++" ] || [ ! -e "$root/usr/bin/python3" ]; then
  scripts/install_deps.sh --if-needed fresh || fail 'it takes debootstrap'
  say "making $root"
  rm -rf "$root"
  debootstrap --variant=minbase --include=make,g++,python3 "${SUITE:-bookworm}" "$root" >"$folder/debootstrap.log" ||
    fail "debootstrap failed: $folder/debootstrap.log"
fi
mkdir -p "$root/usr/local/cuda" "$tree"
mount --bind -o ro "$toolkit" "$root/usr/local/cuda"
mount -t proc proc "$root/proc"

# The files carried into the root. Built programs stay, so that acts may follow each other.
[ -e build/gpu-deps/lib/libcrypto.a ] || dev/gpu/pack_deps.sh
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - --ignore-failed-read | tar -x -C "$tree"
mkdir -p "$tree/build" && cp -r build/gpu-deps "$tree/build/"
carried=$(($(git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | wc -c) / 1048576 + \
  $(du -sm build/gpu-deps | cut -f 1)))
say "carried: $carried MiB"
[ $carried -le 64 ] || fail 'more than 64 MiB are carried'

# in_root NAME=VALUE... COMMAND...
in_root() {
  chroot "$root" /usr/bin/env -i HOME=/root TERM=dumb PATH=/usr/local/cuda/bin:/usr/bin:/bin JOBS="$JOBS" \
    MORE_SECONDS="$MORE_SECONDS" "$@"
}

programs=(train_gpt build/test_cuda_on_gpu build/ladders build/op_table)

# program NAME: writes it as a script, from standard input.
program() {
  rm -f "${tree:?}/$1"
  { printf '#!/bin/sh\n' && cat; } >"$tree/$1"
  chmod +x "$tree/$1"
}

# Replaces the programs for a GPU by those for emulated GPUs, with the libraries that a bare machine lacks.
emulate() {
  local name library
  make -s -j"$JOBS" build/emulated/train_gpt build/emulated/kernels build/emulated/trainer build/emulated/ladders \
    build/emulated/op_table
  mkdir -p "$tree/build/emulated/lib"
  cp build/emulated/{train_gpt,kernels,trainer,ladders,op_table} "$tree/build/emulated/"
  for name in train_gpt kernels; do
    ldd "build/emulated/$name" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p'
  done | sort -u | while IFS= read -r library; do
    [ -e "$root$library" ] || cp -L "$library" "$tree/build/emulated/lib/"
  done
  for name in train_gpt build/ladders build/op_table; do
    program "$name" <<<"LD_LIBRARY_PATH=/train_gpt/build/emulated/lib exec /train_gpt/build/emulated/${name##*/} \"\$@\""
  done
  # A GPU has one test program, this machine two. Only some of the trainer's tests, which take longest, are run.
  program build/test_cuda_on_gpu <<'PROGRAM'
export LD_LIBRARY_PATH=/train_gpt/build/emulated/lib ONE_SCHEDULE=1
case $1 in
  '[trainer]') exec /train_gpt/build/emulated/trainer 'a step allocates nothing*,validation on a GPU*' ;;
esac
exec /train_gpt/build/emulated/kernels "$@"
PROGRAM
}
small=(NO_BUILD=1 SMALL=1
  OP_TABLE_FLAGS='--models d1 -b 1 -t 16 --repeats 1 --peak-size 64 --copy-mib 1 --flush-mib 1 --long-sequence 32')

# checked NAME COMMAND...: runs check.sh in the root; keeps its table and log. Returns its status.
checked() {
  local name=$1 status=0 begin=$SECONDS
  shift
  in_root OUT="/train_gpt/out/$name" "$@" >"$folder/$name.txt" 2>&1 || status=$?
  cp "$tree/out/$name/checks.tsv" "$folder/$name.tsv"
  cp "$tree/out/$name/log.txt" "$folder/$name.log"
  sed -n '/^$/,$p' "$folder/$name.txt"
  say "$name: $((SECONDS - begin)) s, status $status"
  return $status
}
# count STATUS NAME: the number of checks of NAME that ended with STATUS
count() { awk -F '\t' -v status="$1" '$2 == status' "$folder/$2.tsv" | wc -l; }

build_act() { checked build /train_gpt/dev/gpu/check.sh build || fail "not all was built: $folder/build.log"; }
sitting_act() {
  emulate
  checked "sitting-$1" "${small[@]}" /train_gpt/dev/gpu/check.sh --sitting "$1" || fail "something failed: $folder/sitting-$1.log"
}
# Every program fails, then is missing, then does not end. All parts are tried nevertheless, within their limits.
broken_act() {
  local how name sitting parts seconds
  for how in fails missing endless; do
    for name in "${programs[@]}"; do
      case $how in
        fails) program "$name" <<<"echo 'planted: $name fails' >&2; exit 3" ;;
        missing) rm -f "${tree:?}/$name" ;;
        endless) program "$name" <<<'exec sleep 3600' ;;
      esac
    done
    seconds=570
    [ $how != endless ] || seconds=150   # more than the first part may take: the next one begins
    for sitting in 1 2; do
      ! checked "broken-$how-$sitting" "${small[@]}" MORE_SECONDS=1 SITTING_SECONDS=$seconds \
        /train_gpt/dev/gpu/check.sh --sitting "$sitting" || fail "status 0 with programs of which each is broken: $how"
      [ "$(count ok "broken-$how-$sitting")" -eq 0 ] || fail "something is ok with programs of which each is broken: $how"
      parts=$(grep -v '^#' "$folder/broken-$how-$sitting.tsv" | cut -f 1 | sort -u | wc -l)
      [ "$parts" -eq $((sitting == 1 ? 10 : 8)) ] || fail "$parts parts were tried: $how"
    done
  done
}

for act in "${acts[@]}"; do
  case $act in
    build) build_act ;;
    sitting-*) sitting_act "${act#sitting-}" ;;
    broken) broken_act ;;
  esac
done
say 'all as it should be'
