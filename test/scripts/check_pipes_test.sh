#!/usr/bin/env bash
# scripts/check_pipes.sh: which pipes it refuses.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
tried() { # STATUS LINE
  local status=0
  echo "$2" >"$dir/tried.sh"
  scripts/check_pipes.sh "$dir/tried.sh" >"$dir/said" || status=$?
  [ $status = "$1" ] || { echo "check_pipes_test: status $status, expected $1: $2" >&2; exit 1; }
  [ "$1" = 0 ] || grep -qF "tried.sh:1:$2" "$dir/said"
}
for reader in 'head -n 1' 'grep -q y' 'grep -aqx y' 'grep -m1 y' 'grep -i --quiet y' 'LC_ALL=C head' 'sed 1q' "sed -n '/y/{p;q}'" \
  "awk '{ print; exit }'"; do
  tried 1 "x | $reader"
  tried 1 "x 2>&1 |& $reader"
done
tried 0 'x | sed -n 1,6p'
tried 0 'x || grep -q y file'
tried 0 'x | grep -v foo-q'
tried 0 'grep -q y <<<text'
tried 0 'x | header'
echo "check_pipes_test: ok"
