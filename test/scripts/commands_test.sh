#!/usr/bin/env bash
# Scripts, tests, make recipes and the programs they run call no program that bare Debian lacks and nobody installs: all
# are in commands.list. On Debian, the list's claims about packages are checked too.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
list=test/scripts/commands.list
fail() {
  echo "commands_test: $1" >&2
  exit 1
}
# unlisted CALLS: the lines "FILE:LINE COMMAND" that the list does not allow
unlisted() {
  awk 'NR == FNR { for (i = 3; !/^#/ && i <= NF; ++i) from[$i] = $2; next }
    { file = $1; sub(/:[0-9]+$/, "", file) }
    !($2 in from) || (from[$2] ~ "/" && index("," from[$2] ",", "," file ",") == 0)' "$list" "$1"
}

find Makefile .ci/run train_gpt.cu llmc scripts test dev data/*.sh data/*.py -type f \( -name '*.sh' -o -name '*.py' -o -name '*.cpp' \
  -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name Makefile -o -path .ci/run \) -print0 |
  xargs -0 python3 test/scripts/python/list_commands.py >"$dir/calls"
unlisted "$dir/calls" >"$dir/unlisted"
[ ! -s "$dir/unlisted" ] || fail "not in $list (is there a way by bash, coreutils, sed, awk, /proc?):
$(<"$dir/unlisted")"
# Known calls, one of each kind: if a kind were no longer read, nothing else would show it.
for call in 'Makefile:[0-9]+ git' 'Makefile:[0-9]+ clang-format' '\.ci/run:[0-9]+ make' 'scripts/run_tests\.sh:[0-9]+ taskset' \
  'test/run/[a-z_]*\.cpp:[0-9]+ mount' 'test/net/processes\.h:[0-9]+ python3' 'data/prepare_kjv\.sh:[0-9]+ bible'; do
  grep -qE "^$call$" "$dir/calls" || fail "no longer found: $call"
done

# Calls are planted in every place where a program may be called; each is found, at its line.
planted() { # NAME: the file is standard input; each line that has pkill in it calls it
  cat >"$dir/$1"
  python3 test/scripts/python/list_commands.py "$dir/$1" >"$dir/calls"
  unlisted "$dir/calls" | sed -n "s|^$dir/$1:\([0-9]*\) pkill$|\1|p" | sort -nu >"$dir/found"
  grep -n 'pkill' "$dir/$1" | cut -d : -f 1 >"$dir/expected"
  cmp -s "$dir/expected" "$dir/found" || fail "a planted command was missed, or found where there is none: $1:
$(diff "$dir/expected" "$dir/found")"
}
not_planted() { # NAME: nothing in it is a call
  cat >"$dir/$1"
  python3 test/scripts/python/list_commands.py "$dir/$1" >"$dir/calls"
  ! grep -q 'pkill' "$dir/calls" || fail "$1: taken for a call: $(<"$dir/calls")"
}
planted all.sh <<'SH'
pkill -f one
x=$(pkill two)
y="a $(echo "b $(pkill three)") c"
echo a | pkill
true && pkill; true
true || pkill
if pkill; then :; fi
! pkill
while pkill; do :; done
until false; do pkill; done
for i in $(pkill); do :; done
timeout 5 pkill
timeout --kill-after=10 "$limit" pkill
echo 1 | xargs -r pkill -9
echo 1 | xargs -n 1 -I X timeout 5 pkill X
env X=1 pkill
env $settings timeout 60 pkill
X=1 Y="a b" pkill
sudo -n pkill
exec pkill
command pkill
nice -n 5 setsid pkill
(cd /tmp && pkill)
{ pkill; }
f() { pkill; }
case $1 in a) pkill ;; esac
case $1 in
  a | "b)") echo ;;
  *) pkill ;;
esac
[[ -n $(pkill) ]] && echo
[ -n "`pkill`" ]
z=${1:-$(pkill)}
n=$((1 + $(pkill | wc -l)))
cat <(pkill) >/dev/null
bash -c 'pkill x'
trap 'pkill' EXIT
eval "pkill"
find . -exec pkill {} +
>/dev/null pkill
echo a; pkill # pkill
array=(a $(pkill))
run=(timeout 5 pkill); "${run[@]}" x
echo "${x#"$(pkill)"}"
python3 -c 'import subprocess; subprocess.run(["pkill", "x"])'
/usr/bin/pkill
echo \
  && pkill
SH
planted here.sh <<'SH'
cat <<HERE
$(pkill)
HERE
SH
planted script.py <<'PY'
import os, subprocess
subprocess.run(["pkill", "x"], check=True)
subprocess.check_output("ls | pkill", shell=True)
os.system(f"pkill {1}")
os.execvp("pkill", ["x"])
PY
planted test.cpp <<'CPP'
auto e = std::system(text.substr(text.find("kill")).c_str());
int a = std::system("pkill x");
FILE* b = popen(("cd " + folder + " && pkill").c_str(), "r");
int c = std::system(formatted("{} pkill {}", environment, id).c_str());
auto d = run_program("--help", "pkill");
const std::string f = formatted("X=1 {} timeout 5 pkill {}", d, 1); int g = std::system(f.c_str());
CPP
mkdir "$dir/make"
planted make/Makefile <<'MAKE'
X := $(shell pkill)
all:
	@echo a; pkill
	-pkill
	@$(LIST) | xargs -r pkill
Y = @if a; then pkill; fi
MAKE
not_planted not.sh <<'SH'
# pkill
echo pkill "pkill" 'pkill' \
  pkill
pkill() { :; }
pkill
x=pkill y=(pkill) z="$x pkill"
[[ $x = pkill ]]
case $x in pkill) ;; esac
for i in pkill; do :; done
cat <<'HERE'
$(pkill)
pkill
HERE
command -v pkill >/dev/null
(( pkill = 1 ))
echo $((pkill + 1)) ${pkill} ${x:-pkill} >pkill
awk '{ pkill }'
SH
printf 'xargs kill\nenv kill\nkill 1\ntimeout 5 true\n' >"$dir/kill.sh"
[ "$(python3 test/scripts/python/list_commands.py "$dir/kill.sh" | grep -c ' kill$')" = 2 ] ||
  fail "xargs and env know no builtin kill"

# The packages are what the list says they are. Some of Ubuntu's have other names.
debian=$(. /etc/os-release 2>/dev/null && [ "${ID:-}" = debian ] && command -v dpkg-query) || debian=
parts=$(. scripts/dependencies/parts.sh && echo "$parts")
while read -r package from commands; do
  [[ -n $package && $package != '#'* ]] || continue
  case $from in
    first | */*) ;;
    required)
      [ -n "$debian" ] || continue
      state=$(dpkg-query -W -f '${Essential} ${Priority}' "$package" 2>/dev/null) || continue
      [[ $state = 'yes '* || $state = *' required' ]] || fail "$list: $package is not required by this Debian"
      for command in $commands; do
        [ -e "/etc/alternatives/$command" ] || grep -qE "/s?bin/$command$" <<<"$(dpkg-query -L "$package")" ||
          fail "$list: $package has no $command"
      done ;;
    *) awk -v package="$from" '$3 == package { found = 1 } END { exit !found }' <<<"$parts" ||
        fail "$list: scripts/dependencies/parts.sh installs no $from" ;;
  esac
done <"$list"
echo "commands_test: ok"
