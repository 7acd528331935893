#!/bin/sh
# Makes the corpus of `make run` without network access: the King James Bible (public domain) from the Debian package
# bible-kjv -> data/kjv/kjv_train_000000.bin and kjv_val_000000.bin, one token per byte. Each of the 1189 chapters is a
# document: a heading, then one verse per line; 5% of them are for validation. Does nothing if both shards exist.
set -eu
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
CDPATH='' cd "$(dirname "$0")/.."

prefix=data/kjv/kjv
if [ -s ${prefix}_train_000000.bin ] && [ -s ${prefix}_val_000000.bin ]; then
    echo "${prefix}_train_000000.bin and ${prefix}_val_000000.bin already exist"
    exit 0
fi
for program in bible:bible-kjv python3:python3; do
    command -v "${program%:*}" >/dev/null || {
        echo "prepare_kjv.sh: error: program '${program%:*}' not found; install it with: make deps" \
             "(or: apt-get install ${program#*:})" >&2
        exit 1
    }
done

text=$(mktemp)
trap 'rm -f "$text"' EXIT
trap 'exit 130' INT   # dash does not do it by itself
trap 'exit 143' TERM HUP

# bible prints "", "Genesis 1", "", "  1 In the beginning ...", "  2 And the earth ..."; -l: one verse per line.
bible -l 1000000 gen1:1-rev22:21 </dev/null | awk '
    /^  [0-9]+ / { sub(/^  [0-9]+ /, ""); sub(/ +$/, ""); gsub(/  +/, " "); printf "\n%s", $0; verses++; next }
    /./          { printf "%s%s", (chapters++ ? "\n\n" : ""), $0 }
    END          { if (chapters != 1189 || verses != 31102) exit 1 }
' >"$text" || {
    echo "prepare_kjv.sh: error: 'bible gen1:1-rev22:21' did not print 1189 chapters of 31102 verses in all;" \
         "reinstall it with: apt-get install --reinstall bible-kjv bible-kjv-text" >&2
    exit 1
}
python3 data/tokenize_text.py "$text" --format text --split-on '\n\n' --val-fraction 0.05 --out $prefix --overwrite
