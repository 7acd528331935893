#!/usr/bin/env bash
# The random part of the self-test for ten minutes, of draws that no earlier run has had. MINUTES=N: another time. A
# draw that fails is printed with the command that repeats it.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
export OMP_WAIT_POLICY=passive

log=$(mktemp)
trap 'rm -f "$log"' EXIT
./train_gpt --selftest --local-ranks 8 --device cpu --selftest-minutes "${MINUTES:-10}" >"$log" 2>&1 || {
  echo "long_sweep_test: $(cat "$log")" >&2
  exit 1
}
echo "long_sweep_test: ok: $(tail -n 1 "$log")"
