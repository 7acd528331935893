#!/usr/bin/env bash
# Scores a checkpoint with the lm-evaluation-harness (pip install 'lm_eval[hf]'), which downloads its tasks.
# Further arguments are passed on to it.
#
#   scripts/lm_eval.sh out/gpt2_124M/step-018865
#   TOKENIZER=gpt2 scripts/lm_eval.sh out/gpt2_124M/step-018865 --tasks hellaswag,arc_easy --batch_size 64
#
# TOKENIZER: a name that transformers knows, or a directory, if the checkpoint has no tokenizer.
# LM_EVAL: the program, if it is not in PATH: .venv/bin/lm_eval
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac

refuse() {
  echo "lm_eval.sh: error: $*" >&2
  exit 1
}
has_tokenizer() {
  [ -e "$1/tokenizer.json" ] || [ -e "$1/tokenizer.model" ] || { [ -e "$1/vocab.json" ] && [ -e "$1/merges.txt" ]; }
}

[ $# -gt 0 ] || refuse "which checkpoint? give its directory, such as out/gpt2_124M/step-018865"
directory=${1%/}
shift
[ -d "$directory" ] || refuse "$directory: no such directory; give a checkpoint, such as OUT/step-018865"
[ -e "$directory/config.json" ] || refuse "$directory: has no config.json; give a checkpoint, such as OUT/step-018865"
[ -e "$directory/model.safetensors" ] || [ -e "$directory/model.safetensors.index.json" ] ||
  refuse "$directory: has no model.safetensors and no model.safetensors.index.json; was the whole checkpoint copied?"
case $directory${TOKENIZER:-} in
  *,*) refuse "$directory ${TOKENIZER:-}: lm_eval does not accept names with commas; make a link with another name" ;;
esac
[ -n "${TOKENIZER:-}" ] || has_tokenizer "$directory" ||
  refuse "$directory: has no tokenizer; copy the training data's tokenizer.json into it, or set one: TOKENIZER=gpt2"
program=${LM_EVAL:-lm_eval}
command -v "$program" >/dev/null ||
  refuse "$program: no such program; python3 -m venv .venv && .venv/bin/pip install 'lm_eval[hf]'," \
    "then LM_EVAL=.venv/bin/lm_eval scripts/lm_eval.sh ..."

case " $* " in
  *" --tasks"[\ =]*) ;;
  *) set -- --tasks hellaswag "$@" ;; # lm_eval would run both
esac
exec "$program" --model hf --model_args "pretrained=$directory${TOKENIZER:+,tokenizer=$TOKENIZER}" --batch_size 8 "$@"
