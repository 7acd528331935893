#!/usr/bin/env bash
# Prints one translation unit made of several sources: first all their includes, each once; then each source in its own
# namespace, so that their helpers may share names. Compiling a folder of tests in one go takes half the time of
# compiling its files one by one, because most of that time goes into the headers and the templates they instantiate.
#
#   scripts/join_tests.sh SOURCE...        paths from the root of the repository
set -euo pipefail
[ $# -gt 0 ] || { echo "join_tests.sh: no sources" >&2; exit 1; }

cat "$@" | grep -E '^#include ' | awk '!seen[$2]++ { print $1, $2 }'
for source in "$@"; do
  name=${source##*/}
  printf 'namespace %s {\n#include "%s"\n}\n' "joined_${name//[^a-zA-Z0-9]/_}" "$source"
done
