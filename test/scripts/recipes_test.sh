#!/usr/bin/env bash
# Every recipe in scripts/ is a run that the trainer accepts and that fits into one GPU with 80 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
count=0
for recipe in scripts/run_*.sh; do
  [ "$recipe" != scripts/run_tests.sh ] || continue
  if ! plan=$("$recipe" --plan --memory-limit 74 --threads 2 2>&1); then
    printf 'recipes_test: %s is refused:\n%s\n' "$recipe" "$plan" >&2
    exit 1
  fi
  grep -q '^  activations' <<<"$plan" || { echo "recipes_test: $recipe --plan shows no memory" >&2; exit 1; }
  count=$((count + 1))
done
[ "$count" -ge 5 ] || { echo "recipes_test: only $count recipes were found" >&2; exit 1; }
echo "recipes_test: ok, $count recipes"
