# shellcheck shell=bash
# Finds processes, for scripts that stop those of a test. Reads /proc, because bare Debian has no ps, no pgrep and no
# program called kill.

# trainers_with WORD...: the ids of the processes that run train_gpt with these words one after the other among its
# arguments, such as --out-dir and a directory that is one test's own. Words are compared whole; there are no patterns.
trainers_with() {
  local file wanted argv line
  printf -v wanted '\n%s' "$@"
  for file in /proc/[0-9]*/cmdline; do
    { mapfile -d '' -t argv <"$file"; } 2>/dev/null || continue   # it ended just now
    [[ ${argv[0]-} = train_gpt || ${argv[0]-} = */train_gpt ]] || continue
    printf -v line '\n%s' "${argv[@]}"
    [[ $line$'\n' != *"$wanted"$'\n'* ]] || basename "${file%/cmdline}"
  done
}

# kill_all SIGNAL ID...: there may be no ids, or ids of processes that have ended
kill_all() { [ $# -eq 1 ] || kill -s "$@" 2>/dev/null || :; }
