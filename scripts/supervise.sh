#!/usr/bin/env bash
# Keeps a run going: starts it, and starts it again after a crash; it resumes from its newest checkpoint.
#
#   scripts/supervise.sh [OPTION...] -- COMMAND...
#
#   scripts/supervise.sh -- ./train_gpt --train-data 'data/*.bin' -o out/run
#   RANKS=8 scripts/supervise.sh --hosts n1,n2,n3,n4 --min-hosts 2 -- scripts/multi_node/run_mpirun.sh -o out/run ...
#
# COMMAND is any that runs the trainer: ./train_gpt, mpirun, srun, a script; it must be one that may be repeated, so it
# has no --restart. What follows depends on how it ends:
#
#   0             the run is done: so is this script
#   75            it was stopped, and saved (a signal, --time-limit): the same
#   1             the trainer, or a script of multi_node/, has refused something (an option, data, a disk that is full),
#                 and would again: its status is this script's. Where neither has said why, it was mpirun: as below
#   2             the run diverged: tried once more, in case it was a fault of the memory; the same again ends it
#   all others    a crash: a signal, a rank that is lost (status 3): started again, after a wait
#
# Start it in the checkout, or give it absolute paths: it stays in the directory where it is started, but the scripts
# run_* change to their checkout.
#
# The wait is --delay seconds at first, and doubles with every failure up to --max-delay. A newer checkpoint is progress:
# waits and counts begin anew. After --max-failures without progress this script gives up, lists all of them, and ends
# with the status of the last one.
#
# SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to COMMAND (to mpirun, srun and their like as SIGUSR1, which they pass
# on; SIGINT as SIGTERM), and whatever its status is then, it is not started again. If it is a script that the signal
# ends, what it has started gets the signal, too, and is waited for. Ctrl-Z (SIGTSTP) does nothing: it would stop this
# script, and not the run.
#
# Options
#   --out-dir DIR        where the run saves; default: the last --out-dir or -o of COMMAND
#   --max-failures N     default: 5
#   --delay SECONDS      default: 5
#   --max-delay SECONDS  default: 300
#   --hosts A,B,...      before each start all hosts are asked whether they are there; COMMAND finds those that are in its
#                        environment: HOSTS=A,B, which run_mpirun.sh reads, and HOST_COUNT=2. With fewer hosts there are
#                        fewer ranks, so fewer replicas share each batch, which stays the same. If the trainer refuses
#                        that number (ranks must divide the batch), one host less is tried, and so on
#   --spares N           of --hosts, so many wait: the others run, and a spare takes the place of one that stays away, at
#                        once and with the same number of ranks; default: 0. Processes that wait, have started and have
#                        read the checkpoints are ./train_gpt --spare: scripts/multi_node/README.md
#   --min-hosts N        with fewer hosts it does not go on; default: all but the spares
#   --host-wait SECONDS  how long hosts that do not answer are waited for; default: 300. One that is back later is used
#                        from the next start on
#   --probe COMMAND      succeeds if host {} is there; default: this host, or ssh -o BatchMode=yes {} true
#   --help               this text
set -euo pipefail
# A run goes on though nobody reads what this script says: a full disk, a terminal or a reader of a pipe that is gone.
true >&2 || exec 2>/dev/null
trap : PIPE
say() { echo "supervise.sh: $1" >&2 2>/dev/null || :; }
refuse() { say "$1; see scripts/supervise.sh --help"; exit 1; }
# Seconds since this machine has started, in $now: bash's SECONDS follow the time of day, which may jump.
look_at_clock() { read -r now _ </proc/uptime; now=${now%.*}; }

# ---- Options ---------------------------------------------------------------------------------------------------------

out='' own_out='' max_failures=5 first_delay=5 max_delay=300 hosts=() spares=0 min_hosts='' host_wait=300
# shellcheck disable=SC2016    # for another shell
probe='[ {} = localhost ] || [ {} = $(uname -n) ] || ssh -o BatchMode=yes -o ConnectTimeout=10 {} true'
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --help) sed -n '2,/^[^#]/s/^#$\|^# //p' "$0"; exit ;;
    --out-dir | --max-failures | --delay | --max-delay | --hosts | --spares | --min-hosts | --host-wait | --probe) ;;
    *) refuse "'$1': expected one of its options, and -- before the command" ;;
  esac
  [ $# -ge 2 ] || refuse "$1: expected a value"
  case $1 in --max-failures | --delay | --max-delay | --spares | --min-hosts | --host-wait)
    [[ $2 =~ ^[0-9]{1,9}$ && ($2 -gt 0 || $1 = --delay || $1 = --spares || $1 = --host-wait) ]] || refuse "$1 '$2': expected a whole number" ;;
  esac
  case $1 in
    --out-dir) own_out=$2 ;;
    --max-failures) max_failures=$2 ;;
    --delay) first_delay=$2 ;;
    --max-delay) max_delay=$2 ;;
    --hosts) [[ $2 =~ ^[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$ ]] ||
      refuse "--hosts '$2': expected names or IPv4 addresses, separated by commas; a host with an IPv6 address needs a name"
      IFS=, read -r -a hosts <<<"$2" ;;
    --spares) spares=$2 ;;
    --min-hosts) min_hosts=$2 ;;
    --host-wait) host_wait=$2 ;;
    --probe) probe=$2 ;;
  esac
  shift 2
done
[ $# -ge 2 ] || refuse "expected -- and the command that starts the run"
shift
type -P "$1" >/dev/null || refuse "'$1': there is no such program here, or it may not be run"
command=("$@") word=
for word in "${command[@]}"; do
  [ "$word" != --restart ] || refuse "--restart would start the run over after each crash: leave it out, or start the run
  once without this script"
  resume=auto
  [ "${previous-}" != --resume ] || resume=$word
  [[ $word != --resume=* ]] || resume=${word#*=}
  [ "$resume" = auto ] || refuse "--resume $resume is refused once the run has checkpoints of its own, so after a crash: leave
  it out, or start the run once without this script"
  case ${previous-} in --out-dir | -o) out=$word ;; esac   # the last one wins; srun has an -o of its own
  [[ $word != --out-dir=* ]] || out=${word#*=}
  previous=$word
done
out=${own_out:-$out}
[ -n "$out" ] || refuse "where does the run save? The command names no --out-dir; give this script its own: --out-dir DIR"
[ "$spares" = 0 ] || [ "$spares" -lt ${#hosts[@]} ] || refuse "--spares $spares: there are ${#hosts[@]} in --hosts"
wanted=$((${#hosts[@]} - spares))   # hosts that run
min_hosts=${min_hosts:-$wanted}
[ "$min_hosts" -le "$wanted" ] ||
  refuse "--min-hosts $min_hosts: there are ${#hosts[@]} in --hosts$([ "$spares" = 0 ] || echo ", $spares of them --spares")"

# ---- Signals ---------------------------------------------------------------------------------------------------------

running='' sleeper=''   # processes of the command; `sleep`
stopped_by='' interrupted='' ctrl_c=0   # the first signal; one has come just now; how many Ctrl-C have come
stop() { # SIGNAL
  [ "$1" != INT ] || ctrl_c=$((ctrl_c + 1))
  stopped_by=${stopped_by:-$1} interrupted=yes
  [ -z "$running" ] || pass_on "$1"
  [ -z "$sleeper" ] || kill "$sleeper" 2>/dev/null || :   # it may have come just before `wait`
}
pass_on() { # SIGNAL
  local signal
  if [ "$1" = INT ]; then   # commands in a script's background are started without it
    set -- TERM
    [ $ctrl_c -le 1 ] || set -- TERM INT   # by which a trainer, which takes it, ends at once
  fi
  case ${command[0]##*/} in mpirun | mpirun.* | mpiexec | mpiexec.* | orterun | prterun | srun) set -- USR1 ;; esac
  for signal in "$@"; do
    # shellcheck disable=SC2086    # a list
    kill -s "$signal" $running 2>/dev/null || :
  done
}
for signal in INT TERM HUP USR1 USR2; do
  # shellcheck disable=SC2064    # the signal of this turn
  trap "stop $signal" "$signal"
done
trap '' TSTP   # for what runs beside this script, too, which would wait for it
# wait_for PROCESS: returns its status; a signal ends `wait` early
wait_for() {
  local status
  interrupted=yes
  while [ -n "$interrupted" ]; do
    interrupted='' status=0
    wait "$1" 2>/dev/null || status=$?
  done
  return $status
}
exit_if_stopped() {
  [ -z "$stopped_by" ] || { say "stopped by SIG$stopped_by between two starts; the same command goes on"; exit 75; }
}
pause() { # SECONDS: or until a signal comes
  sleep "$1" &
  sleeper=$!
  [ -n "$stopped_by" ] || wait "$sleeper" 2>/dev/null || :
  kill "$sleeper" 2>/dev/null || :
  sleeper=
  exit_if_stopped
}

# ---- What has become of the run --------------------------------------------------------------------------------------

# The step of the newest checkpoint, without leading zeros. One that has its name is complete (contract 13); one that is
# damaged loses its name when the run is resumed.
newest_checkpoint() {
  local path newest step
  # Those on the nodes' own disks (--checkpoint-local) are in metrics.jsonl alone until the run is resumed from them.
  newest=$(sed -n 's/.*"kind":"checkpoint".*"saved":\([0-9]*\).*"local":true.*/\1/p' "$out/metrics.jsonl" 2>/dev/null |
    sort -n | tail -n 1) || :
  newest=${newest:-0}
  for path in "$out"/step-*/manifest.json; do
    step=${path%/manifest.json} step=${step##*/step-}
    if [[ -e $path && $step =~ ^[0-9]+$ && $((10#$step)) -gt $newest ]]; then newest=$((10#$step)); fi
  done
  echo "$newest"
}
last_step() { # that was reported
  tail -c 65536 "$out/metrics.jsonl" 2>/dev/null | sed -n 's/.*"kind":"train".*"step":\([0-9]*\).*/\1/p' | tail -n 1 || :
}
last_error() { # the trainer's, or that of a script in multi_node/, or else the last line
  local pattern line
  for pattern in '^train_gpt: ' '^run_[a-z]*\.sh: ' .; do
    if line=$(grep -a "$pattern" "$errors" | tail -n 1); then break; fi
  done
  printf '%s' "${line:-nothing was printed}"
}
ended_how() { # STATUS
  if [ "$1" -gt 128 ] && signal=$(kill -l $(($1 - 128)) 2>/dev/null); then echo "killed by SIG$signal"
  else echo "status $1"; fi
}

# ---- Hosts -----------------------------------------------------------------------------------------------------------

answering() { # prints the hosts that are there; all are asked at once
  local host asked=() i
  for host in "${hosts[@]}"; do
    timeout 60 bash -c "${probe//\{\}/$host}" >/dev/null 2>&1 </dev/null &
    asked+=($!)
  done
  for i in "${!hosts[@]}"; do
    ! wait "${asked[i]}" || echo "${hosts[i]}"
  done
}
listed() { local IFS=,; echo "$*"; }
without() { # HOST...: those of --hosts that are not among them
  local host
  for host in "${hosts[@]}"; do [[ " $* " = *" $host "* ]] || echo "$host"; done
}
most_hosts=$wanted   # fewer where the trainer has refused that many
# Sets and exports HOSTS and HOST_COUNT; fails if too few hosts are there.
choose_hosts() { # SECONDS that all hosts are waited for
  [ ${#hosts[@]} -gt 0 ] || return 0
  local up away deadline said=
  look_at_clock
  deadline=$((now + $1))
  while :; do
    mapfile -t up < <(answering)
    mapfile -t away < <(without "${up[@]}")
    [ ${#up[@]} -lt "$wanted" ] || break
    if [ -z "$said" ] && [ "$1" -gt 0 ]; then
      say "no answer from $(listed "${away[@]}"): waiting up to $1 s (--host-wait)"
      said=yes
    fi
    look_at_clock
    [ "$now" -lt "$deadline" ] || break
    pause $((deadline - now < 5 ? deadline - now : 5))
  done
  [ ${#away[@]} -gt 0 ] || most_hosts=$wanted
  if [ ${#up[@]} -lt "$min_hosts" ]; then
    echo "of ${#hosts[@]} hosts ${#up[@]} answer, fewer than --min-hosts $min_hosts: no answer from $(listed "${away[@]}")" >"$errors"
    return 1
  fi
  [ ${#up[@]} -le "$most_hosts" ] || up=("${up[@]:0:most_hosts}")
  HOST_COUNT=${#up[@]} HOSTS=$(listed "${up[@]}")
  export HOSTS HOST_COUNT
  if [ ${#away[@]} -gt 0 ] && [ "$HOST_COUNT" = "$wanted" ]; then
    say "no answer from $(listed "${away[@]}"): with the spares the run goes on on $HOSTS"
  fi
  [ "$HOST_COUNT" = "$wanted" ] ||
    say "going on with $HOST_COUNT of $wanted hosts, $HOSTS: fewer replicas share each batch, which stays the same"
}

# ---- Starts ----------------------------------------------------------------------------------------------------------

# The stderr of the last start, in a file without a name: what removes old files from /tmp cannot take it away.
errors=$(mktemp)
exec {errors_file}<>"$errors"
rm "$errors"
errors=/dev/fd/$errors_file

mark=$$.$RANDOM   # in the environment of all that the command starts
# The processes of a session, which setsid gave its number.
processes_of() {
  local file text fields
  for file in /proc/[0-9]*/stat; do
    { text=$(<"$file"); } 2>/dev/null || continue
    read -r -a fields <<<"${text##*) }"
    if [ "${fields[3]}" = "$1" ] && [ "${fields[0]}" != Z ]; then file=${file%/stat} && echo "${file##*/}"; fi
  done
}
# Those, and what has left the session, as run_mpirun.sh's mpirun does.
all_of() {
  processes_of "$1"
  grep -lszxF "SUPERVISED=$mark" /proc/[0-9]*/environ | sed 's/[^0-9]//g' || :
}
# What a crash left running holds the lock of the out directory: it may end by itself, for ten seconds.
end_leftovers() { # SESSION
  local tries left=
  for ((tries = 0; tries < 100; ++tries)); do
    left=$(all_of "$1")
    [ -n "$left" ] || return 0
    sleep 0.1
  done
  # shellcheck disable=SC2086    # a list
  kill -s KILL $left 2>/dev/null || :
}
# A script that a signal has ended may have left the trainer running, which has not heard of it.
stop_leftovers() { # SESSION
  running=$(processes_of "$1")
  [ -z "$running" ] || pass_on "$stopped_by"
  while [ -n "$running" ]; do
    sleep 0.1
    running=$(processes_of "$1")
  done
}
# Returns once `tee` has copied all, or after five seconds, if a process that nobody finds has stderr open.
wait_for_copy() {
  local end
  look_at_clock
  end=$((now + 5))
  while kill -0 "$copy" 2>/dev/null && [ "$now" -lt "$end" ]; do
    sleep 0.1
    look_at_clock
  done
}
# Runs the command until it ends. setsid: a Ctrl-C at the terminal reaches it only through this script.
start() {
  local status=0 copy session stderr
  exec {stderr}> >(exec setsid tee -p "$errors" >&2)
  copy=$!
  (trap - TSTP && SUPERVISED=$mark exec setsid "${command[@]}") </dev/null 2>&"$stderr" {stderr}>&- {errors_file}>&- &
  session=$! running=$session
  exec {stderr}>&-
  [ -z "$stopped_by" ] || pass_on "$stopped_by"
  wait_for "$session" || status=$?
  running=
  if [ -n "$stopped_by" ]; then stop_leftovers "$session"
  elif [ $status != 0 ] && [ $status != 75 ]; then end_leftovers "$session"
  fi
  wait_for_copy
  [ $status = 0 ] || kill "$copy" 2>/dev/null || :   # the next start has a `tee` of its own
  return $status
}

best=$(newest_checkpoint) failures=() delay=$first_delay patience=$host_wait
while :; do
  status=0 cause=crash
  : >"$errors"
  choose_hosts "$patience" || status=1 cause='too few hosts'
  patience=$host_wait
  exit_if_stopped   # while the hosts were asked
  [ $status != 0 ] || start || status=$?
  if [ $status = 0 ] || [ $status = 75 ]; then exit $status; fi
  if [ -n "$stopped_by" ]; then
    say "the run was stopped by SIG$stopped_by and ended with $(ended_how $status), not 75; the same command goes on"
    exit $status
  fi
  error=$(last_error)
  if [ $status = 1 ] && [ "$cause" = crash ] && [[ $error =~ ^(train_gpt|run_[a-z]+\.sh):\  &&
    $error != *'another run is writing'* ]]; then
    if [ ${#hosts[@]} -gt 0 ] && [ "$HOST_COUNT" -lt "$wanted" ] && [ "$HOST_COUNT" -gt "$min_hosts" ]; then
      most_hosts=$((HOST_COUNT - 1)) patience=0   # those that are away have just been waited for
      say "the run was refused on $HOST_COUNT hosts; trying $most_hosts"
      continue
    fi
    say "the run was refused, and would be again, so it is not restarted: $error"
    exit 1
  fi

  newest=$(newest_checkpoint) step=$(last_step)
  if [ "$newest" -gt "$best" ]; then best=$newest failures=() delay=$first_delay; fi
  failure="$(ended_how $status) after step ${step:-0}, newest checkpoint: step $newest: $error"
  if [ $status = 2 ] && [[ " ${failures[*]} " = *'status 2 after'* ]]; then
    say "the run diverged again, so it is not restarted: $error"
    exit 2
  fi
  failures+=("$failure")
  if [ "$cause" = crash ] && [ ${#failures[@]} -gt 1 ] && [ ! -d "$out" ]; then
    say "there is no $out here, so no checkpoint is seen: does the run save elsewhere (--out-dir)?"
  fi
  if [ ${#failures[@]} -ge "$max_failures" ]; then
    say "giving up after ${#failures[@]} failures without a newer checkpoint than that of step $best (--max-failures):"
    printf '  %s\n' "${failures[@]}" >&2 2>/dev/null || :
    exit $status
  fi
  say "failure ${#failures[@]} of $max_failures without progress: $failure; starting again in $delay s"
  pause "$delay"
  delay=$((2 * delay < max_delay ? 2 * delay : max_delay))
done
