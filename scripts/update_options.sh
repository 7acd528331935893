#!/usr/bin/env bash
# Writes the option tables that ./train_gpt prints into dev/docs/options.md, between its two markers.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/.."
file=dev/docs/options.md
{
  sed '/^<!-- options:/q' $file
  echo
  ./train_gpt --print-options-markdown
  echo
  sed -n '/^<!-- end of options/,$p' $file
} >build/options.md
mv build/options.md $file
