#!/usr/bin/env bash
# Collects, on a machine with Debian's packages, the headers and libraries that a GPU build needs and a bare GPU machine
# lacks. Copy the folder there with the sources; dev/gpu/check.sh finds it, and
#
#   CPLUS_INCLUDE_PATH=build/gpu-deps/include LIBRARY_PATH=build/gpu-deps/lib make DEVICE=cuda
#
# builds with it. (CPPFLAGS='-isystem build/gpu-deps/include' LDFLAGS=-Lbuild/gpu-deps/lib does the same.)
#
#   dev/gpu/pack_deps.sh [FOLDER]      default: build/gpu-deps
#
# A package that is not installed is downloaded without installing it. The libraries are linked statically.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

folder=${1:-build/gpu-deps}
# shellcheck source=scripts/dependencies/parts.sh
. scripts/dependencies/parts.sh
# shellcheck disable=SC2154    # parts, and the folder probes, which is removed at the end: parts.sh
mapfile -t packages < <(awk '$1 == "build" && $4 == "required" && $2 != "cxx" || $2 == "catch2" { print $3 }' <<<"$parts")
scratch=$probes

if [ -n "$(ls -A "$folder" 2>/dev/null)" ] && [ ! -e "$folder/pack_deps.txt" ]; then
  echo "pack_deps.sh: $folder is not empty, and this script did not make it: name another, or remove it" >&2
  exit 1
fi
rm -rf "$folder"
mkdir -p "$folder/include" "$folder/lib"
echo "${packages[*]}" >"$folder/pack_deps.txt"
for package in "${packages[@]}"; do
  root=
  if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
    root=$scratch/$package
    mkdir -p "$root"
    # apt switches to its own user, who cannot write into our folder
    (cd "$root" && apt-get -q -o APT::Sandbox::User=root download "$package" >/dev/null && dpkg-deb -x ./*.deb .) || {
      echo "pack_deps.sh: $package is not installed and cannot be downloaded: run apt-get update, or install it" >&2
      exit 1
    }
  fi
  # Paths below include/ and lib/, without the architecture's folder.
  while IFS= read -r file; do
    case $file in
      */usr/include/*)
        header=${file#*/usr/include/}
        header=${header#"$(gcc -print-multiarch)"/}
        mkdir -p "$folder/include/$(dirname "$header")"
        cp -L "$file" "$folder/include/$header" ;;
      # Catch2 2 is headers alone
      */libxxhash.a | */libcrypto.a | */libz.a | */libzstd.a | */libCatch2.a) cp -L "$file" "$folder/lib/" ;;
    esac
  done < <(if [ -n "$root" ]; then find "$root" -not -type d; else
    dpkg -L "$package" | while IFS= read -r file; do [ -d "$file" ] || echo "$file"; done
  fi)
done
echo "$folder: ${packages[*]}, $(du -sm "$folder" | cut -f 1) MB"
