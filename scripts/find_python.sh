#!/bin/sh
# Prints the first Python that has all the named modules, of $PYTHON, python3 in PATH, and the system's own. They
# differ where a version manager or a virtual environment comes first in PATH: apt-get installs modules for
# /usr/bin/python3 only.
#
#   scripts/find_python.sh [MODULE...]          exits 1, and prints nothing, where there is none
for python in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
  # find_spec looks without importing: importing matplotlib takes a second
  "$python" -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))' \
    "$@" 2>/dev/null || continue
  echo "$python"
  exit 0
done
exit 1
