#!/usr/bin/env bash
# Installs the Debian packages that train_gpt needs: only what is missing, and only the sets that are named.
#
#   scripts/install_deps.sh [--if-needed] [build|test|long|run|check|fresh|slurm|arm|browser ...]
#
# Default: all sets but fresh, slurm, arm and browser, which are for single long tests.
#
# As root, or with a sudo that asks for no password, it installs, and repairs installed packages that have lost files;
# otherwise it names what is missing, prints the command to type and exits 1. --if-needed is for make: it does nothing
# unless something REQUIRED is missing. A machine that lacks only optional parts (no root, no network) is then left
# alone; `make deps` offers them again.
#
# scripts/dependencies/parts.sh has the list of parts and packages, and how each is looked for. If build/config.mk
# disagrees with what is found now, it is removed, and make looks again.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."
# shellcheck source=scripts/dependencies/parts.sh
. scripts/dependencies/parts.sh

say() { echo "install_deps.sh: $*"; }
fail() { say "error: $*" >&2; exit 1; }

# find_missing: looks for the sets' parts; puts the missing ones into the arrays required and optional
find_missing() {
  local part
  required=() optional=()
  look_for "${wanted[@]}"
  for part in "${wanted[@]}"; do
    if is_there "$part"; then continue; fi
    if [ "$(entry "$part" 4)" = required ]; then required+=("$part"); else optional+=("$part"); fi
  done
}

# Removes make's earlier answers if one of them disagrees with what was found now.
forget_old_answers() {
  local part
  for part in $(parts_of build test long); do
    [[ -e build/config.mk && -e $probes/$part.answers ]] || continue
    cmp -s <(grep -E "^${part^^}_[A-Z]+ :=" build/config.mk) "$probes/$part.answers" || rm -f build/config.mk
  done
}

# names PART...: "xxHash (libxxhash-dev): neither xxhash.h nor -lxxhash"
names() {
  local part
  for part in "$@"; do echo "  $(entry "$part" 5) ($(entry "$part" 3)): $(<"$probes/$part.fault")"; done
}

# packages_of PART...: each once
packages_of() {
  local part
  for part in "$@"; do entry "$part" 3; done | awk '!seen[$0]++'
}

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) = installed ]]; }

# damaged PACKAGE...: those of these packages and their dependencies that are installed and have lost or changed files.
# Ignores documentation, which many machines leave out.
damaged() {
  apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "$@" 2>/dev/null | sed -n '/^[a-z0-9]/p' | xargs -r dpkg --verify 2>/dev/null |
    awk '$2 != "c" && $NF !~ "^/usr/share/(doc|doc-base|man|info|locale|lintian)/" { print $NF }' |
    xargs -r dpkg -S 2>/dev/null | sed 's/[:,].*//' | sort -u
}

# apt ARGUMENTS...: apt-get that asks nothing, waits for another one to finish, and prints only if it fails
apt() {
  local status=0
  ${sudo:+sudo -n} env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >"$probes/apt.log" 2>&1 || status=$?
  return $status
}
# The errors and warnings that apt printed.
apt_errors() { grep -E '^(E|W): ' "$probes/apt.log" | awk '!seen[$0]++' | tail -n 5 | sed 's/^/  /' || true; }

# installed_and_damaged PACKAGE...: packages to install again, so that these are whole
installed_and_damaged() {
  local package installed=()
  for package in "$@"; do ! is_installed "$package" || installed+=("$package"); done
  [ ${#installed[@]} -eq 0 ] || damaged "${installed[@]}"
}

install_packages() {
  local package packages=("${required_packages[@]}") again options=(--no-install-recommends)
  # One broken third-party source makes update fail while Debian's own lists are fine: let install decide.
  apt update || { say "warning: apt-get update failed; trying with the lists there are" >&2; apt_errors >&2; }
  for package in "${optional_packages[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1; then packages+=("$package"); else
      say "$package, which is optional, is in no package list of this machine: skipped"
    fi
  done
  [ ${#packages[@]} -gt 0 ] || return 0
  [ -z "$(dpkg --audit 2>/dev/null)" ] || ${sudo:+sudo -n} dpkg --configure -a >/dev/null 2>&1 || true
  # Dependencies of installed packages may have been removed by force: apt-get must repair them first.
  if ! apt check; then
    say "installing what installed packages depend on"
    apt install "${options[@]}" --fix-broken || return
  fi
  mapfile -t again < <(installed_and_damaged "${packages[@]}")
  if [ ${#again[@]} -gt 0 ]; then
    say "reinstalling, because files are missing or changed: ${again[*]}"
    apt install --reinstall "${options[@]}" "${again[@]}" || return
  fi
  say "installing ${packages[*]} (a minute or two)"
  apt install "${options[@]}" "${packages[@]}"
}

if_needed=no
sets=()
for argument in "$@"; do
  case $argument in
    --if-needed) if_needed=yes ;;
    build | test | long | run | check | fresh | slurm | arm | browser) sets+=("$argument") ;;
    *) fail "unknown argument '$argument'; usage: scripts/install_deps.sh [--if-needed]" \
         "[build|test|long|run|check|fresh|slurm|arm|browser ...]" ;;
  esac
done
[ ${#sets[@]} -gt 0 ] || sets=(build test long run check)
mapfile -t wanted < <(parts_of "${sets[@]}")

find_missing
forget_old_answers
if [ ${#required[@]} -eq 0 ]; then
  [ "$if_needed" = no ] || exit 0
  [ ${#optional[@]} -gt 0 ] || { say "everything is there (${sets[*]})"; exit 0; }
fi
[ ${#required[@]} -eq 0 ] || { say "missing:"; names "${required[@]}"; }
[ ${#optional[@]} -eq 0 ] || { say "missing, but optional:"; names "${optional[@]}"; }

mapfile -t required_packages < <(packages_of "${required[@]}")
mapfile -t optional_packages < <(packages_of "${optional[@]}")
if ! command -v apt-get >/dev/null; then
  say "no apt-get here: please install what these Debian packages hold: ${required_packages[*]} ${optional_packages[*]}" >&2
  exit $((${#required[@]} > 0))
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
  sudo=yes
  if ! sudo -n true 2>/dev/null; then
    mapfile -t again < <(installed_and_damaged "${required_packages[@]}" "${optional_packages[@]}")
    say "this takes root; please run:" >&2
    all=("${required_packages[@]}" "${optional_packages[@]}")
    echo "  sudo apt-get update && sudo apt-get install --no-install-recommends ${all[*]}" >&2
    [ ${#again[@]} -eq 0 ] || echo "  sudo apt-get install --reinstall ${again[*]}" >&2
    exit $((${#required[@]} > 0))
  fi
fi

failed=no errors=
install_packages || { failed=yes errors=$(apt_errors); }
find_missing
forget_old_answers
if [ ${#required[@]} -gt 0 ]; then
  mapfile -t required_packages < <(packages_of "${required[@]}")
  if [ $failed = yes ]; then printf '%s\n' "$(say "error: apt-get could not install ${required_packages[*]}")" "$errors"; else
    say "error: installed, and still missing:"
    names "${required[@]}"
  fi >&2
  say "install ${required_packages[*]} by hand; the build's compiler and flags are '$CXX $flags${LDFLAGS:+ $LDFLAGS}'" >&2
  exit 1
fi
# Without an optional package there is still a trainer.
[ $failed = no ] || { say "warning: apt-get could not install ${optional_packages[*]}, which is optional"; echo "$errors"; } >&2
