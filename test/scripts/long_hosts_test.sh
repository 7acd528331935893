#!/usr/bin/env bash
# Several hosts: network namespaces of this machine, each with an address, a name, an /etc/hosts and a disk of its own,
# at one switch. Processes meet by name, IPv4 and IPv6, by TCP and mpirun, and end with the weights of threads; an outage
# changes nothing. Then a cable is pulled (nothing closes the connections), two hosts cannot reach each other, or a host
# loses packets of full size: all processes end soon and say where; a supervised run goes on without the host, and what
# its disk had is on another one.
#
# Takes root, and ip.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
skip() { echo "long_hosts_test: skipped: $1"; exit 77; }
[ "$(id -u)" = 0 ] || skip "only root makes network namespaces"
command -v ip >/dev/null || skip "there is no ip (iproute2)"

# shellcheck source=test/scripts/processes.sh
. test/scripts/processes.sh
dir=$(mktemp -d)
name=${dir##*.}
count=4
finish() {
  # shellcheck disable=SC2046
  for host in switch $(seq $count); do
    kill_all KILL $(ip netns pids "$name-$host")
    ip netns delete "$name-$host"
  done
  rm -rf "$dir"
} 2>/dev/null
trap 'set +e; finish' EXIT
trap 'exit 130' INT TERM
fail() {
  tail -n 20 "$dir"/log.* >&2 || :
  echo "long_hosts_test: ${case-}: $1" >&2
  exit 1
}

# ---- The hosts -------------------------------------------------------------------------------------------------------

no_ipv6=
ip netns add "$name-switch" 2>"$dir/log.ip" || skip "no network namespaces here: $(<"$dir/log.ip")"
switch() { ip -n "$name-switch" "$@"; }
switch link add switch type bridge 2>"$dir/log.ip" || skip "no bridges here: $(<"$dir/log.ip")"
switch link set switch up
for host in $(seq $count); do
  ip netns add "$name-$host"
  switch link add "port$host" type veth peer name eth0 netns "$name-$host"
  switch link set "port$host" master switch up
  at() { ip -n "$name-$host" "$@"; }
  at link set lo up
  at addr add "10.77.0.$host/24" dev eth0
  at addr add "fd77::$host/64" dev eth0 nodad 2>/dev/null || no_ipv6=yes
  at link set eth0 up
  at link add docker0 type bridge   # the same on all hosts, as usual
  at addr add 172.17.0.1/16 dev docker0
  at link set docker0 up
  # As on Debian: a host's own name is a loopback address.
  { printf '%s\n' '127.0.0.1 localhost' "127.0.1.1 n$host"
    for other in $(seq $count); do [ "$other" = "$host" ] || echo "10.77.0.$other n$other"; done; } >"$dir/hosts.$host"
  mkdir "$dir/disk.$host"
done
mkdir "$dir/disk"
# on HOST COMMAND...
on() {
  # shellcheck disable=SC2016  # for the host's shell
  ip netns exec "$name-$1" unshare --uts --mount bash -ec 'hostname "n$1"; mount --bind "$2/hosts.$1" /etc/hosts
    mount --bind "$2/disk.$1" "$2/disk"; exec "${@:3}"' on "$1" "$dir" "${@:2}"
}
plug() { switch link set "port$1" "$2"; } # HOST up|down
# A cable is pulled, and then the power cut: nothing closes the connections.
vanish() { # HOST
  touch "$dir/down.$1"
  plug "$1" down
  # shellcheck disable=SC2046
  kill_all KILL $(ip netns pids "$name-$1")
}
# What mpirun takes for ssh: [OPTION]... HOST COMMAND. It stays if the host vanishes.
{ declare -f on
  echo "name=$name dir=$dir status=0"
  # shellcheck disable=SC2016
  echo 'while [[ $1 = -* ]]; do shift; done
    on "${1#n}" bash -c "cd $PWD; ${*:2}" || status=$?
    [ ! -e "$dir/down.${1#n}" ] || exec tail -f /dev/null
    exit $status'; } >"$dir/ssh"
export OMPI_MCA_plm_rsh_agent="bash $dir/ssh" PRTE_MCA_plm_ssh_agent="bash $dir/ssh"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export TRAIN_GPT_TOKEN=a-token-that-only-the-job-knows

# ---- Runs ------------------------------------------------------------------------------------------------------------

run=(--model d1 --n-layer 4 --n-embd 12 --n-head 2 --vocab-size 211 --seq-len 33 --batch-size 2 --total-batch-size 792
  --lr 1e-2 --threads 1 --device cpu --train-data test/golden/gpt2_tiny/train.bin --max-steps 1000)
port=29500
# start MEETING HOST... -- OPTION...: a process on each host; `pids` are theirs
start() {
  local at=$1:$((++port)) hosts=() host rank=0
  shift
  while [ "$1" != -- ]; do hosts+=("$1"); shift; done
  rm -f "$dir"/log.*
  pids=()
  for host in "${hosts[@]}"; do
    on "$host" ./train_gpt "${run[@]}" --rank $rank --world-size ${#hosts[@]} --rendezvous "$at" \
      --out-dir "$dir/run" "${@:2}" >"$dir/log.$host" 2>&1 &
    pids+=($!)
    rank=$((rank + 1))
  done
}
reaches() { # STEP, or some later one
  for ((tries = 0; tries < 6000; ++tries)); do
    ! grep -qs "\"step\":$1," "$dir/run/metrics.jsonl" || return 0
    sleep 0.02
  done
  fail "step $1 was not reached"
}
# all_end STATUS SECONDS
all_end() {
  local begin=$SECONDS pid status
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ $((SECONDS - begin)) -le "$2" ]; do sleep 0.05; done
    ! kill -0 "$pid" 2>/dev/null || fail "a process still runs after $2 s"
    status=0
    wait "$pid" || status=$?
    [ $status -eq "$1" ] || fail "a process ended with status $status, expected $1"
  done
}
says() { # WORDS LOG...
  local log
  for log in "${@:2}"; do grep -qE -e "^train_gpt: .*$1" "$dir/log.$log" || fail "log.$log does not say: $1"; done
}
same_as() { # OUT: the last checkpoint of the run is that of this one
  local file
  for file in "$1"/step-001000/*.safetensors; do
    cmp -s "$file" "$dir/run/step-001000/${file##*/}" || fail "${file##*/} is not that of the run by threads"
  done
}
case='three threads'
./train_gpt "${run[@]}" --local-ranks 3 --out-dir "$dir/threads" >"$dir/log.threads" 2>&1 || fail "the run failed"

for case in 10.77.0.1 n1 ${no_ipv6:-'[fd77::1]'}; do
  [ "$case" != yes ] || continue
  rm -rf "$dir/run"
  start "$case" 1 2 3 --
  all_end 0 120
  same_as "$dir/threads"
done

case='an outage of 10 seconds'
rm -rf "$dir/run"
start 10.77.0.1 1 2 3 --
reaches 20
plug 2 down
sleep 10
! grep -q '"step":1000,' "$dir/run/metrics.jsonl" || fail "the run had ended before it"
plug 2 up
all_end 0 180
same_as "$dir/threads"

for host in 1 2 3; do # processes 0 and 1 judge the others
  case="n$host vanishes"
  rm -rf "$dir/run"
  start 10.77.0.1 1 2 3 -- --max-steps 1000000
  reaches 3
  plug $host down
  all_end 3 60
  # shellcheck disable=SC2046
  says "rank $((host - 1)) on n$host has (gone|not arrived|not finished)" $(seq 3 | grep -v $host)
  plug $host up
done

case='n3 and n4 do not reach each other'
rm -rf "$dir/run"
start 10.77.0.1 1 2 3 4 -- --max-steps 1000000 --total-batch-size 264
reaches 3
ip -n "$name-3" route add blackhole 10.77.0.4
all_end 3 60
says 'n[34] .*n[34]' 1 2 3 4
ip -n "$name-3" route delete blackhole 10.77.0.4

case='n3 cannot send packets of full size'
rm -rf "$dir/run"
for host in 1 2 3; do
  ip -n "$name-$host" link set eth0 mtu 9000
  [ $host = 3 ] || switch link set "port$host" mtu 9000
done
start 10.77.0.1 1 2 3 -- --init-timeout 45
all_end 3 70
says 'from 10.77.0.3 a process has connected, but what it sends next does not arrive: .* MTU' 1 2
says 'was reached, but answers no more .*MTU' 3
for host in 1 2 3; do
  ip -n "$name-$host" link set eth0 mtu 1500
  switch link set "port$host" mtu 1500
done

case='n3 vanishes with its disk'
rm -rf "$dir/run"
local=(--checkpoint-every 0 --checkpoint-local "$dir/disk/checkpoints" --checkpoint-local-every 20)
start 10.77.0.1 1 2 3 -- "${local[@]}"
reaches 70
plug 3 down
all_end 3 60
start 10.77.0.1 1 2 4 -- "${local[@]}"
all_end 0 120
step=$(sed -n 's/.*the newest complete checkpoint is a local one, of step \([0-9]*\):.*/\1/p' "$dir/log.1")
[ "${step:-0}" -ge 40 ] || fail "its part was lost"
same_as "$dir/threads"
plug 3 up

if command -v mpirun >/dev/null && grep -q 'MPI [0-9]' <<<"$(./train_gpt --version)"; then
  case='mpirun'
  rm -rf "$dir/run"
  RANKS=1 HOSTS=n1,n2,n3 on 1 scripts/multi_node/run_mpirun.sh "${run[@]}" --out-dir "$dir/run" >"$dir/log.1" 2>&1 ||
    fail "status $?"
  same_as "$dir/threads"

  case='mpirun, supervised; n3 vanishes'
  rm -rf "$dir/run"
  on 1 scripts/supervise.sh --hosts n1,n2,n3 --min-hosts 2 --host-wait 0 --delay 0 \
    --probe "ip neigh flush dev eth0; timeout 2 bash -c ': >/dev/tcp/{}/9' 2>&1 | grep 'Connection refused' >/dev/null" \
    --out-dir "$dir/run" -- env RANKS=1 scripts/multi_node/run_mpirun.sh "${run[@]}" --max-steps 2000 \
    --checkpoint-every 20 --keep-checkpoints 2 --comm-timeout 10 --out-dir "$dir/run" >"$dir/log.1" 2>&1 &
  pids=($!)
  reaches 43
  vanish 3
  all_end 0 300
  grep -q 'the trainers on this host ended a minute ago, but mpirun has not' "$dir/log.1" || fail "mpirun was not killed"
  grep -q 'going on with 2 of 3 hosts, n1,n2' "$dir/log.1" || fail "it does not go on with two hosts"
fi
echo "long_hosts_test: ok"
