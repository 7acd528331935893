#!/usr/bin/env bash
# Writes the option table that ./train_gpt prints into README.md, between its two markers.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  sed '/^<!-- options:/q' README.md
  echo
  ./train_gpt --print-options-markdown
  echo
  sed -n '/^<!-- end of options/,$p' README.md
} >build/README.md
mv build/README.md README.md
