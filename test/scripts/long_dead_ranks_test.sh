#!/usr/bin/env bash
# dead_ranks_test.sh with random processes, moments, forms and stages: [COUNT=40], SEED=N repeats them.
exec "$(dirname "$0")/dead_ranks_test.sh" "${1:-40}"
