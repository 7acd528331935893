#!/usr/bin/env bash
# Every header compiles when a program includes nothing else: none of the others, with which `make check` compiles it in
# one program, and none of the libraries' headers, which it reads first.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
ALONE=1 make --no-print-directory check-headers
