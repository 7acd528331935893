#!/usr/bin/env bash
# processes_test.sh in every stage, dtype and form, and the whole self-test under mpirun and over TCP.
exec "$(dirname "$0")/processes_test.sh" all
