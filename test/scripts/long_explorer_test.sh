#!/usr/bin/env bash
# The page of scripts/explorer.py in a headless Chromium: each control is moved, and every figure, bar and box compared
# with the program's own plan; its pictures' texts do not overlap; the ring's steps are those of llmc/comm/ring.h.
#
# From the environment: CHROMIUM, another Chromium than Debian's. Skipped where there is none, nor can be installed.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
skip() { echo "long_explorer_test: skipped: $1"; exit 77; }
[ -n "${CHROMIUM:-}" ] || scripts/install_deps.sh --if-needed browser || skip 'it takes Chromium'
chromium=$(command -v "${CHROMIUM:-chromium}") || skip "there is no program $CHROMIUM (CHROMIUM)"
export PYTHONDONTWRITEBYTECODE=1
checked=$(python3 -S test/scripts/python/check_explorer_page.py "$chromium") || { # only the standard library
  echo 'long_explorer_test: failed' >&2
  exit 1
}
echo "long_explorer_test: ok, $checked"
