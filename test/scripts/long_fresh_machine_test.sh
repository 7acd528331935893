#!/usr/bin/env bash
# `make run` and `make test` on bare machines: in roots of Debian (or Ubuntu: whatever this machine is) that debootstrap
# makes. Needs root and, in all forms, a network, but none of the tree's own dependencies.
#
#   test/scripts/long_fresh_machine_test.sh [bare|half|offline|user|each ...]      default: all of them
#
#   bare      nothing but make, git and ca-certificates
#   half      g++, and half of every dependency: headers without their library, a library without its headers, packages
#             that have lost files, an old Catch2, an nvcc that is broken. Without network `make test` names them all and
#             compiles nothing; with it, it repairs them
#   offline   everything there, and no network
#   user      everything there, and a user who is not root and has no sudo; with one package missing, `make test` names
#             it and compiles nothing
#   each      each package that scripts/dependencies/parts.sh lists is deleted from a copy: without network it is refused by
#             name before anything is compiled (or, if optional, done without), with network it is installed
#
# From the environment:
#   FRESH_TARGETS='run test'     what the first four forms make; 'ci' is .ci/run, so `make check` and `make test`;
#                                FRESH_TARGETS=config only looks at the machine, installs and looks again, which takes a
#                                minute a form
#   FRESH_CACHE=build/fresh_machine   the bare root, the one with everything, and logs; about 2 GB; rm -rf when done
#   FRESH_SUITE=trixie           another release than this machine's, from the same mirror
#   FRESH_PACKAGES=              for each: these packages instead of the list
#   RUN_FLAGS='--max-steps 150'   for make run
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

forms=("$@")
[ $# -gt 0 ] || forms=(bare half offline user each)
for form in "${forms[@]}"; do
  case $form in
    bare | half | offline | user | each) ;;
    *) echo "$0: unknown form '$form'; use bare, half, offline, user or each" >&2; exit 1 ;;
  esac
done
say() { echo "fresh_machine_test: $*"; }

not_tried() {
  say "not tried: $*"
  exit 77
}
[ "$(id -u)" -eq 0 ] || not_tried "it makes whole file systems, which takes root: sudo $0"
command -v apt-get >/dev/null || not_tried "it makes roots of Debian, with apt-get, and there is none here"
unshare --mount true 2>/dev/null || not_tried "root may not mount here (a container? docker run --privileged)"
scripts/install_deps.sh --if-needed fresh || not_tried "it takes debootstrap"
# Mounts made from here on are visible to this script alone, and are gone when it ends, however it ends.
[ -n "${FRESH_OWN_MOUNTS:-}" ] || FRESH_OWN_MOUNTS=yes exec unshare --mount "$0" "${forms[@]}"

# shellcheck source=/dev/null
own_suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
suite=${FRESH_SUITE:-$own_suite}
targets=${FRESH_TARGETS:-run test}
run_flags=${RUN_FLAGS:---max-steps 150}
cache=$(mkdir -p "${FRESH_CACHE:-build/fresh_machine}" && CDPATH='' cd "${FRESH_CACHE:-build/fresh_machine}" && pwd)
logs=$cache/logs
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'umount -R "$work"/*/root 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
mkdir -p "$logs"
failures=0
table=()

# The packages that `make run` and `make test-long` need, each once.
parts=$(. scripts/dependencies/parts.sh && echo "$parts")
listed() { awk '$1 ~ /^(build|test|long|run)$/ && !seen[$3]++ { print $3 }' <<<"$parts"; }

# ---- Roots -------------------------------------------------------------------------------------------------------------

# inside ROOT [online|offline] [root|builder] COMMAND: runs it in the tree, by bash, in a process tree that ends with it
# shellcheck disable=SC2016    # the inner shell's variables
inside() {
  local root=$1 network=$2 user=$3 net=()
  shift 3
  [ "$network" = online ] || net=(--net)
  unshare --mount --pid --fork --kill-child "${net[@]}" bash -euc '
    root=$1 network=$2
    shift 2
    mount -t proc proc "$root/proc"
    mount --bind /dev "$root/dev"
    mount --bind /dev/pts "$root/dev/pts"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount --rbind /sys "$root/sys"
    if [ "$network" = offline ]; then   # such a machine still talks to itself
      perl -e '\''$up = pack("Z16 s x22", "lo", 1); socket($s, 2, 2, 0) && ioctl($s, 0x8914, $up) or die "no loopback: $!"'\''
    fi
    exec "$@"' - "$root" "$network" \
    env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb DEBIAN_FRONTEND=noninteractive \
    HOME="$([ "$user" = root ] && echo /root || echo /home/builder)" "${proxies[@]}" \
    chroot --userspec="$user:" "$root" bash -c "cd /home/builder/train_gpt 2>/dev/null; $*" </dev/null
}
mapfile -t proxies < <(env | grep -iE '^(https?|ftp|no|all)_proxy=' || true)

# Lets apt find the same packages inside as outside; or those of another release, as debootstrap has set it up.
like_this_machine() {
  local root=$1 folder folders=(/etc/apt/apt.conf.d /usr/local/share/ca-certificates)
  if [ "$suite" = "$own_suite" ]; then
    rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d
    folders+=(/etc/apt /usr/share/keyrings)
  fi
  for folder in "${folders[@]}"; do
    [ ! -d "$folder" ] || { mkdir -p "$root$folder" && cp -a "$folder/." "$root$folder"; }
  done
  cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
  inside "$root" online root 'update-ca-certificates >/dev/null; apt-get -q update' >"$logs/update" 2>&1 || {
    cat "$logs/update"
    say "apt-get update fails in a new root"
    exit 1
  }
}

base=$cache/$suite-base
full=$cache/$suite-full-$(listed | cksum | cut -d ' ' -f 1)

make_base() {
  local mirror known started=$SECONDS
  [ ! -d "$base" ] || return 0
  # The source of this machine's own packages.
  for known in "$suite" "$own_suite"; do
    mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' "Codename: $known" | sed -n 1p)
    [ -z "$mirror" ] || break
  done
  [ -n "$mirror" ] || { say "apt has no source here for '$suite': set FRESH_SUITE, or run apt-get update"; exit 1; }
  rm -rf --one-file-system "$base.new"
  debootstrap --variant=minbase --include=make,git,ca-certificates "$suite" "$base.new" "$mirror" \
    >"$logs/debootstrap" 2>&1 || { tail "$logs/debootstrap"; say "debootstrap failed, see $logs/debootstrap"; exit 1; }
  like_this_machine "$base.new"
  chroot "$base.new" useradd --create-home --shell /bin/bash builder
  mv "$base.new" "$base"
  say "made a bare root in $((SECONDS - started)) s"
}

make_full() {
  local started=$SECONDS packages
  [ ! -d "$full" ] || return 0
  make_base
  mapfile -t packages < <(listed)
  rm -rf --one-file-system "$full.new"
  cp -a "$base" "$full.new"
  inside "$full.new" online root "apt-get -q update && apt-get -q -y install --no-install-recommends ${packages[*]}" \
    >"$logs/full" 2>&1 || { tail "$logs/full"; say "apt-get could not install the list, see $logs/full"; exit 1; }
  chroot "$full.new" apt-get clean
  mv "$full.new" "$full"
  say "made a root with everything in $((SECONDS - started)) s"
}

# fresh NAME FROM: makes a temporary root like FROM, with the tree; sets the variable root
fresh() {
  local name=$1 from=$2 tree
  mkdir -p "$work/$name"/{upper,work,root}
  root=$work/$name/root
  mount -t overlay overlay -o "lowerdir=$from,upperdir=$work/$name/upper,workdir=$work/$name/work" "$root" \
    2>/dev/null || cp -a "$from/." "$root"
  tree=$root/home/builder/train_gpt
  git clone -q --no-hardlinks . "$tree"
  # ... and what is not committed yet
  git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - 2>/dev/null |
    tar -x -C "$tree"
  git ls-files -z --deleted | (cd "$tree" && xargs -0 -r rm -f)
  chown -R "$(stat -c %u:%g "$root/home/builder")" "$tree"
  printf '[safe]\n\tdirectory = *\n' >"$root/etc/gitconfig"
}
drop() {
  umount -R "$root" 2>/dev/null || true
  rm -rf --one-file-system "$(dirname "$root")"
}

# ---- What is tried in them ---------------------------------------------------------------------------------------------

# failed WORDS...: reports a failure, and goes on
failed() {
  say "FAILED: $*"
  failures=$((failures + 1))
}

# succeeds FORM NETWORK USER: makes the targets
succeeds() {
  local form=$1 network=$2 user=$3 target log started status command result processor TIMEFORMAT='%U %S'
  for target in $targets; do
    log=$logs/$form-$target status=0 started=$SECONDS
    case $target in
      ci) command='.ci/run' ;;
      run) command="make run RUN_FLAGS='$run_flags'" ;;
      config) command='scripts/install_deps.sh --if-needed build test run && make config' ;;
      *) command="make $target" ;;
    esac
    { time inside "$root" "$network" "$user" "$command" >"$log" 2>&1 || status=$?; } 2>"$logs/time"
    processor=$(awk '{ printf "%.0f", $1 + $2 }' "$logs/time")   # this machine may have others to serve
    result=$(tail -n 1 "$log")
    [ "$status" -eq 0 ] || failed "$form: $command ended with status $status; see $log, which ends:
$(tail -n 15 "$log")"
    case $target in
      run) [ -s "$root/home/builder/train_gpt/out/kjv/metrics.jsonl" ] || failed "$form: make run trained nothing: $log" ;;
      ci | test*) [[ $result =~ ^[0-9]+' passed, 0 failed'$ ]] || failed "$form: $command ended with '$result': $log" ;;
    esac
    table+=("| $form | $command | $((SECONDS - started)) s | $processor s | $result |")
    say "$form: $command: $((SECONDS - started)) s, of processors $processor s: $result"
  done
}

# remove PACKAGE LOG: removes it by force, and the package that it stands for if it is only another name:
# libboost-context1.74-dev, python3-minimal
remove() {
  # shellcheck disable=SC2016    # the root's shell expands them
  inside "$root" offline root "package=$1"'
    mapfile -t others < <(apt-cache depends --installed "$package" | sed -n "s/^ *\(Pre\)\{0,1\}Depends: //p")
    names=("$package")
    bare() { sed "s/[0-9.]//g; s/-minimal//" <<<"$1"; }
    for other in "${others[@]}"; do [ "$(bare "$other")" != "$(bare "$package")" ] || names+=("$other"); done
    dpkg --purge --force-depends "${names[@]}"' >"$2" 2>&1 || failed "dpkg could not remove $1: $2"
}

# refuses FORM NETWORK USER TARGET WORDS...: make TARGET fails, says all these words, and has compiled nothing
refuses() {
  local form=$1 network=$2 user=$3 target=$4 log=$logs/$1-refused-$4 word built
  shift 4
  if inside "$root" "$network" "$user" "timeout 300 make $target" >"$log" 2>&1; then
    failed "$form: make $target succeeded without $*: $log"
  fi
  for word in "$@"; do grep -qF -- "$word" "$log" || failed "$form: make $target does not say '$word': $log"; done
  built=$(find "$root"/home/builder/train_gpt/{train_gpt,build} \( -name '*.o' -o -name '*.gch' -o -name '*.so' \
    -o -name train_gpt -type f \) -print -quit 2>/dev/null) || true
  [ -z "$built" ] || failed "$form: make $target had built $built before it refused: $log"
}

try_bare() {
  make_base
  fresh bare "$base"
  succeeds bare online root
  drop
}

try_half() {
  make_base
  fresh half "$base"
  # shellcheck disable=SC2016    # the root's own shell expands them
  inside "$root" online root '
    set -e
    apt-get -q update
    apt-get -q -y install --no-install-recommends g++ libcli11-dev nlohmann-json3-dev libxxhash-dev libssl-dev \
      libzstd-dev libboost-dev python3-minimal bible-kjv
    rm /usr/include/CLI/App.hpp                                   # a package that has lost a header
    rm -r /usr/include/nlohmann/detail/output
    rm /usr/include/xxhash.h                                      # a library without its header
    rm "$(g++ -print-file-name=libcrypto.so)" "$(g++ -print-file-name=libcrypto.a)"
    rm /usr/include/zstd.h
    rm "$(g++ -print-file-name=libasan.so)" "$(g++ -print-file-name=libasan.a)"
    dpkg --purge --force-depends bible-kjv-text                   # a program without its data
    mkdir -p /usr/include/catch2                                  # too old
    printf "#pragma once\n#define CATCH_VERSION_MAJOR 2\n#define CATCH_VERSION_MINOR 4\n#define CATCH_VERSION_PATCH 1\n" \
      >/usr/include/catch2/catch.hpp
    printf "#!/bin/sh\necho \"nvcc: error while loading shared libraries: libnothing.so\" >&2\nexit 127\n" \
      >/usr/local/bin/nvcc
    chmod +x /usr/local/bin/nvcc
    apt-get clean' >"$logs/half" 2>&1 || { tail "$logs/half"; failed "half: see $logs/half"; return; }
  refuses half offline root test libcli11-dev 'App.hpp: No such file' nlohmann-json3-dev libxxhash-dev \
    '-lxxhash is there, but xxhash.h is not' libssl-dev 'openssl/hmac.h is there, but -lcrypto is not' zlib1g-dev \
    'neither zlib.h nor -lz' libzstd-dev '-lzstd is there, but zstd.h is not' libtomlplusplus-dev catch2 'version 2.4.1' \
    libboost-context-dev 'fcontext.hpp is there, but -lboost_context is not' AddressSanitizer python3
  refuses half offline root run bible-kjv python3-matplotlib
  succeeds half online root
  inside "$root" online root 'make config' >"$logs/half-config" 2>&1 || true
  grep -q 'nvcc is there, but builds no C++20' "$logs/half-config" ||
    failed "half: make config does not say what is wrong with nvcc: $logs/half-config"
  drop
}

try_offline() {
  make_full
  fresh offline "$full"
  succeeds offline offline root
  drop
}

try_user() {
  make_full
  fresh user "$full"
  remove libboost-context-dev "$logs/user-remove"
  refuses user online builder test libboost-context-dev Boost.Context 'this takes root' 'sudo apt-get update && sudo apt-get'
  drop
  fresh user "$full"
  succeeds user online builder
  drop
}

try_each() {
  local package packages sets target log started=$SECONDS
  make_full
  mapfile -t packages < <(listed)
  # shellcheck disable=SC2206    # a list of words
  [ -z "${FRESH_PACKAGES:-}" ] || packages=($FRESH_PACKAGES)
  for package in "${packages[@]}"; do
    log=$logs/each-$package
    sets=$(awk -v package="$package" '$3 == package { print $1, $4 }' <<<"$parts")
    fresh each "$full"
    remove "$package" "$log"
    if [[ $sets = *optional* ]]; then
      what='done without when offline'
      inside "$root" offline root 'scripts/install_deps.sh --if-needed build test run && make config' >>"$log" 2>&1 ||
        failed "each: not done without $package, which is optional: $log"
    else
      target='test'
      [[ $sets != 'run required' ]] || target=run
      what="refused by make $target when offline"
      refuses "each-$package" offline root "$target" "$package"
    fi
    # `make deps` installs optional parts, too.
    inside "$root" online root "scripts/install_deps.sh build test run && make config &&
      dpkg -s $package | grep '^Status: install ok installed' >/dev/null" >>"$log" 2>&1 ||
      failed "each: $package was not installed again: $log"
    say "each: $package: $what, installed when online"
    drop
  done
  table+=("| each | ${#packages[@]} packages deleted | $((SECONDS - started)) s | | |")
}

for form in "${forms[@]}"; do "try_$form"; done
echo '| machine | what | time | of processors | last line |'
echo '| --- | --- | --- | --- | --- |'
printf '%s\n' "${table[@]}"
[ $failures -eq 0 ] || { say "$failures failures"; exit 1; }
say "ok: ${forms[*]}, with $suite on $(nproc) processors"
