#!/usr/bin/env bash
# If the reader of a pipe ends early, the writer may die of SIGPIPE, rarely and on a busy machine; under pipefail the
# script then fails. So no script pipes into head, grep -q or -m, sed with q, or awk with exit.
#
#   scripts/check_pipes.sh FILE...     names the lines that do; exit status 1 if there are any
set -euo pipefail
early='head\>|grep +([^|]* )?(-[a-zA-Z]*[qm]|--quiet|--silent|--max-count)|sed +[^|]*([0-9$/;{ ]q\>)|awk +[^|]*\<exit\>'
lines=$(grep -HnE "(^|[^|])\|&? *([A-Za-z_]+=[^ ]* +)*($early)" "$@") || exit 0
echo "$lines"
echo 'check_pipes.sh: a pipe into a command that ends early: use sed -n 1p, or grep -q on a file or <<<'
exit 1
