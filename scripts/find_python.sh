#!/bin/sh
# Prints the first Python that has all the named modules: $PYTHON, python3 in PATH, or the system's own. They differ
# when a version manager or a virtual environment comes first in PATH: apt-get installs modules only for
# /usr/bin/python3.
#
#   scripts/find_python.sh [MODULE...]          exits 1 and prints nothing if there is none
for python in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
  # find_spec does not import: importing matplotlib takes a second
  "$python" -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' \
    "$@" 2>/dev/null || continue
  echo "$python"
  exit 0
done
exit 1
