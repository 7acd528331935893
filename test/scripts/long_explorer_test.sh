#!/usr/bin/env bash
# The page of scripts/explorer.py in a headless Chromium: each control is moved, and every figure, bar and box compared
# with the program's own plan; its pictures' texts do not overlap; the ring's steps are those of llmc/comm/ring.h.
#
# Skipped where there is no Chromium: apt-get install chromium, or CHROMIUM=/path/to/chrome.
set -euo pipefail
cd "$(dirname "$0")/../.."
skip() { echo "long_explorer_test: skipped: $1"; exit 77; }
chromium=$(command -v "${CHROMIUM:-chromium}" || command -v chromium-browser || command -v google-chrome) ||
  skip "there is no Chromium (Debian package chromium)"
export PYTHONDONTWRITEBYTECODE=1
checked=$(python3 -S test/scripts/python/check_explorer_page.py "$chromium") || { # only the standard library
  echo 'long_explorer_test: failed' >&2
  exit 1
}
echo "long_explorer_test: ok, $checked"
