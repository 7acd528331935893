#!/usr/bin/env bash
# scripts/explorer.py: every number that it answers is the program's, every control reaches its option, and requests
# that its page would not make are refused before a program runs. long_explorer_test.sh has the page in a browser.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export PYTHONDONTWRITEBYTECODE=1
checked=$(python3 -S test/scripts/python/check_explorer.py "$dir") || { # only the standard library
  echo 'explorer_test: failed' >&2
  exit 1
}
echo "explorer_test: ok, $checked"
