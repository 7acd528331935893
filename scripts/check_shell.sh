#!/usr/bin/env bash
# Two things that work almost always are refused in scripts:
#   - a pipe into head, grep -q or -m, sed with q, or awk with exit. If the reader ends early, the writer may die of
#     SIGPIPE, rarely and on a busy machine; under pipefail the script then fails.
#   - cd to "$(dirname ...)" without CDPATH=''. Where CDPATH is exported, cd may go elsewhere, and prints where it goes.
#
#   scripts/check_shell.sh FILE...     names the lines that do; exit status 1 if there are any
set -euo pipefail
early='head\>|grep +([^|]* )?(-[a-zA-Z]*[qm]|--quiet|--silent|--max-count)|sed +[^|]*([0-9$/;{ ]q\>)|awk +[^|]*\<exit\>'
files=("$@") status=0
refuse() { # PATTERN WHY
  local lines
  lines=$(grep -HnE "$1" "${files[@]}") || return 0
  echo "$lines"
  echo "check_shell.sh: $2"
  status=1
}
refuse "(^|[^|])\|&? *([A-Za-z_]+=[^ ]* +)*($early)" \
  'a pipe into a command that ends early: use sed -n 1p, or grep -q on a file or <<<'
refuse "(^|[^'] |[^ ])\<cd [^ ]*\\\$\(dirname" "an exported CDPATH would lead elsewhere: use CDPATH='' cd"
exit $status
