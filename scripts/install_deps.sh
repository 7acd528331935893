#!/usr/bin/env bash
# Installs what train_gpt needs out of Debian's packages: only what is missing, and only the sets that are named.
#
#   scripts/install_deps.sh [--if-needed] [build|test|run|check ...]        no set named: all of them
#
# As root, or with a sudo that asks for no password, it installs; otherwise it prints the command to type and exits 1.
# --if-needed is for `make test` and `make run`: it does nothing, quickly, as long as nothing REQUIRED is missing. A
# machine that lacks only optional parts (no root, no network) is then left in peace; `make deps` offers them again.
set -euo pipefail
cd "$(dirname "$0")/.."

# The one list of packages. A probe looks for the thing itself and not for the package, so that a library that came
# from elsewhere (conda, pip, a source build named in CPPFLAGS) counts as there.
#   set    package              necessity  probe
packages='
    build  g++                  required   command g++
    build  libcli11-dev         required   header  CLI/CLI.hpp
    build  nlohmann-json3-dev   required   header  nlohmann/json.hpp
    build  libxxhash-dev        required   header  xxhash.h
    build  libdnnl-dev          optional   header  dnnl.h
    test   catch2               required   header  catch2/catch.hpp catch2/catch_all.hpp
    test   libboost-context-dev required   header  boost/context/detail/fcontext.hpp
    test   python3              required   command python3
    run    bible-kjv            required   command bible
    run    python3              required   command python3
    run    python3-matplotlib   required   module  matplotlib
    check  clang-format         required   command clang-format
    check  shellcheck           required   command shellcheck
    check  python3              required   command python3
'

say() { echo "install_deps.sh: $*"; }
fail() { say "error: $*" >&2; exit 1; }

# is_there command|header|module NAME...: one of the names is enough
is_there() {
  local kind=$1 name condition
  shift
  case $kind in
    command)
      name=$1
      [ "$name" != g++ ] || name=${CXX:-g++}   # whichever compiler the build is told to use; it may be two words: ccache g++
      # shellcheck disable=SC2086
      command -v $name >/dev/null ;;
    header)
      condition=0
      for name in "$@"; do condition+=" || __has_include(<$name>)"; done
      # shellcheck disable=SC2086    # compiler and flags are lists of words
      printf '#if !(%s)\n#error\n#endif\n' "$condition" |
        ${CXX:-g++} ${CPPFLAGS:-} ${CXXFLAGS:-} -x c++ -E - >/dev/null 2>&1 ;;
    module) scripts/find_python.sh "$1" >/dev/null 2>&1 ;;
  esac
}

# find_missing: puts the wanted sets' packages that are not there into the array missing, and into required or optional
find_missing() {
  local set package necessity probe
  required=() optional=() missing=()
  while read -r set package necessity probe; do
    [[ -n $set && " ${sets[*]} " == *" $set "* && " ${required[*]} " != *" $package "* ]] || continue
    # shellcheck disable=SC2086    # the probe's words are is_there's arguments
    is_there $probe && continue
    if [ "$necessity" = required ]; then required+=("$package"); else optional+=("$package"); fi
    missing+=("$package")
  done <<<"$packages"
}

# apt ARGUMENTS...: apt-get that asks nothing, waits for another one to finish, and is heard only when it fails
apt() {
  local log status=0
  log=$(mktemp)
  ${sudo:+sudo -n} env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >"$log" 2>&1 || status=$?
  [ $status -eq 0 ] || cat "$log" >&2
  rm -f "$log"
  return $status
}

install_packages() {
  local package wanted=("${required[@]}")
  # One broken third-party source makes update fail while Debian's own lists are fine: let install decide.
  apt update || say "warning: apt-get update failed; trying with the lists there are" >&2
  for package in "${optional[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1; then wanted+=("$package"); else
      say "$package, which is optional, is in no package list of this machine: skipped"
    fi
  done
  [ ${#wanted[@]} -gt 0 ] || return 0
  say "installing ${wanted[*]} (a minute or two)"
  apt install --no-install-recommends "${wanted[@]}"
}

if_needed=no
sets=()
for argument in "$@"; do
  case $argument in
    --if-needed) if_needed=yes ;;
    build | test | run | check) sets+=("$argument") ;;
    *) fail "unknown argument '$argument'; usage: scripts/install_deps.sh [--if-needed] [build|test|run|check ...]" ;;
  esac
done
[ ${#sets[@]} -gt 0 ] || sets=(build test run check)

find_missing
if [ ${#required[@]} -eq 0 ]; then
  [ "$if_needed" = no ] || exit 0
  [ ${#optional[@]} -gt 0 ] || { say "everything is there (${sets[*]})"; exit 0; }
fi
[ ${#required[@]} -eq 0 ] || say "missing: ${required[*]}"
[ ${#optional[@]} -eq 0 ] || say "missing, but optional: ${optional[*]}"

if ! command -v apt-get >/dev/null; then
  say "no apt-get here: please install what these Debian packages hold: ${missing[*]}" >&2
  exit $((${#required[@]} > 0))
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
  sudo=yes
  if ! sudo -n true 2>/dev/null; then
    say "this takes root; please run:" >&2
    echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    exit $((${#required[@]} > 0))
  fi
fi

install_packages || {
  # Without an optional package there is still a trainer; without a required one there is none.
  [ ${#required[@]} -eq 0 ] || fail "apt-get could not install: ${required[*]}"
  say "warning: apt-get could not install ${optional[*]}, which is optional" >&2
}
rm -f build/config.mk   # what make found before no longer holds
find_missing
[ ${#required[@]} -eq 0 ] || fail "installed, and still not found: ${required[*]} (compiler: ${CXX:-g++})"
