#!/usr/bin/env bash
# Finds out what this machine has by building with it, and prints the answers as make variables for build/config.mk: the
# version of a part that works, else nothing, and a fault if something of it is there. A missing part is an error only
# if the trainer cannot be built without it.
#
#   CXX=g++ NVCC=nvcc CPPFLAGS= CXXFLAGS= LDFLAGS= NVCCFLAGS= CUDNN_HOME= CUDNN_FRONTEND_HOME= scripts/configure.sh \
#     >build/config.mk
#
# scripts/dependencies/parts.sh has the list of parts and how each is looked for.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
# shellcheck source=scripts/dependencies/parts.sh
. scripts/dependencies/parts.sh

mapfile -t wanted < <(parts_of build test long other)
look_for "${wanted[@]}"
if is_there nvcc; then
  mapfile -t of_nvcc < <(parts_of nvcc)
  look_for "${of_nvcc[@]}"
  wanted+=("${of_nvcc[@]}")
fi

echo "# Written by scripts/configure.sh: what this machine has. 'make reconfigure' asks again."
# What was not found is empty, whatever the environment has under the same name, such as NCCL_VERSION.
mapfile -t all_parts < <(parts_of build test long other nvcc)
echo "\$(foreach part,${all_parts[*]^^},\$(foreach x,VERSION FAULT FLAGS LIBS ARCH,\$(eval \$(part)_\$x :=)))"
echo 'GPU :='
for part in "${wanted[@]}"; do cat "$probes/$part.answers"; done

missing=0
while read -r part; do
  if is_there "$part" || [ "$(entry "$part" 4)" != required ]; then continue; fi
  missing=1
  echo "configure.sh: error: $(entry "$part" 5) is required: $(<"$probes/$part.fault")" >&2
  [ "$part" != cxx ] || break   # without a compiler no other probe means anything
done < <(parts_of build)
[ $missing -eq 0 ] || echo "configure.sh: 'make deps' installs what is missing" >&2
exit $missing
