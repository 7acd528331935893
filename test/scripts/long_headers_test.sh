#!/usr/bin/env bash
# Every header compiles when a program includes nothing else, the standard library's headers included, which `make check`
# reads first to save half of its time.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
ALONE=1 make --no-print-directory check-headers
