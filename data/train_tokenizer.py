#!/usr/bin/env python3
"""Trains a tokenizer on text, JSONL, Parquet or Arrow files: byte-level BPE, as GPT-2's.

    python3 -m venv .venv && .venv/bin/pip install tokenizers
    .venv/bin/python data/train_tokenizer.py 'corpus/*.txt' --vocab-size 8192 --out data/my_tokenizer
    .venv/bin/python data/tokenize_text.py 'corpus/*.txt' --tokenizer data/my_tokenizer --out data/corpus
    ./train_gpt -i 'data/corpus_train_*.bin' --tokenizer data/my_tokenizer --vocab-size 8192 ...

writes OUT/tokenizer.json, which transformers and the trainer read, and OUT/tokenizer_config.json, which tells
transformers the end of text. Ids: 256 bytes, then the merges in the order in which they were learned, and last the end
of text. A text is split by GPT-2's pattern into words, numbers, punctuation and white space before pairs are counted;
every text can be encoded, because every byte has a token.

More tokens make sequences shorter and the embedding and the head of the model larger: 257 are bytes, 4,096 to 8,192
suit models of a few million parameters, 32,768 and more those of 100 million and more. A few hundred MB of text are
enough for any of these (--max-bytes); the counts of all distinct words are held in memory.

Exit status: 0 done, 1 refused or failed with the reason in one line on stderr. On failure nothing is changed.
"""

import argparse
import json
import os
import signal
import sys
import time

sys.dont_write_bytecode = True   # data/ holds data
from documents import documents, find_files, kind_of, read_chunks, text_bytes   # noqa: E402
from programs import DataError, end_by_signal, on_signals, replacing, run_program   # noqa: E402
from text_tokenizers import utf8   # noqa: E402
from tokenize_text import Parser, Progress, add_input_options, count, made_folder   # noqa: E402

BYTES = 256
LARGEST = BYTES + (1 << 21) + 1   # the trainer takes 2^21 merges


def texts(options, files, progress):
    """Yields the documents, long ones in pieces, until --max-bytes are read."""
    done = 0
    for path in files:
        for chunk in read_chunks(path, kind_of(path, options.format), options.split_on, options.json_field):
            for piece in documents(chunk, options.split_on, options.json_field):
                yield utf8(piece)
                done += len(piece.text)
                if options.max_bytes and done >= options.max_bytes:
                    return
            progress.add(len(chunk.data), 0)


def train(options, files):
    """The trained tokenizers.Tokenizer, and the bytes of text that it saw. DataError: unusable input."""
    try:
        import tokenizers
    except ImportError:
        raise DataError("training a tokenizer needs the Python package 'tokenizers'; install it with: python3 -m venv "
                        ".venv && .venv/bin/pip install tokenizers, then run .venv/bin/python data/train_tokenizer.py "
                        "...") from None
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=options.vocab_size - 1, min_frequency=options.min_frequency,
                                             initial_alphabet=byte_level.alphabet(), show_progress=False)
    sizes = [text_bytes(path, kind_of(path, options.format), options.json_field) for path in files]
    total = None if None in sizes else sum(sizes)
    progress = Progress(min(total, options.max_bytes or total) if total else None, "counting words: ")
    seen = 0

    def counted():
        nonlocal seen
        for text in texts(options, files, progress):
            seen += len(text.encode())
            yield text
        progress.clear()
        print(f"learning {options.vocab_size - 1 - BYTES:,} merges from {seen / 1e6:,.1f} MB ...", file=sys.stderr,
              flush=True)

    tokenizer.train_from_iterator(counted(), trainer)
    if seen == 0:
        raise DataError(f"no text in {' '.join(files)}")
    if tokenizer.token_to_id(options.eot) is not None:
        raise DataError(f"--eot {options.eot}: the text made this an ordinary token; take a name that it does not hold")
    tokenizer.add_special_tokens([tokenizers.AddedToken(options.eot, special=True, normalized=False)])
    return tokenizer, seen


def write(options, tokenizer):
    """Both files, each in place at once; tokenizer.json last."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": options.eot, "eos_token": options.eot,
              "clean_up_tokenization_spaces": False}
    for name, text in (("tokenizer_config.json", json.dumps(config, indent=1)),
                       ("tokenizer.json", tokenizer.to_str(pretty=True))):
        with replacing(os.path.join(options.out, name)) as file:
            file.write(text + "\n")


def parse_options(arguments):
    description, _, rest = __doc__.partition("\n\n")
    parser = Parser(prog="train_tokenizer.py", allow_abbrev=False, description=description, epilog=rest,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text, JSONL, Parquet or Arrow files, globs, folders")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder for the two files")
    parser.add_argument("--vocab-size", type=count, default=8192, metavar="N",
                        help="tokens in all, with 256 bytes and the end of text (default: 8192)")
    parser.add_argument("--eot", default="<|endoftext|>", metavar="TOKEN",
                        help="name of the end-of-text token (default: <|endoftext|>)")
    parser.add_argument("--min-frequency", type=count, default=2, metavar="N",
                        help="merge no pair that is rarer than this (default: 2)")
    parser.add_argument("--max-bytes", type=count, metavar="N", help="read only this much text, such as 5e8")
    add_input_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the tokenizer in the folder")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse_options(arguments)
    if not BYTES < options.vocab_size <= LARGEST:
        raise DataError(f"--vocab-size {options.vocab_size}: expected {BYTES + 1} (bytes and the end of text) to "
                        f"{LARGEST}")
    if not options.eot.strip():
        raise DataError("--eot is empty: name a token that no text holds, such as <|endoftext|>")
    standing = os.path.join(options.out, "tokenizer.json")
    if os.path.exists(standing) and not options.overwrite:
        raise DataError(f"{standing} exists already; --overwrite replaces it: what was tokenized with it needs it")
    began = time.monotonic()
    tokenizer, seen = train(options, find_files(options.inputs, options.format))
    on_signals(end_by_signal)
    with made_folder(options.out):
        write(options, tokenizer)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    print(f"tokens  {size:,}, end of text {tokenizer.token_to_id(options.eot)}",
          f"text    {seen / 1e6:,.1f} MB, {time.monotonic() - began:.1f} s",
          f"wrote   {standing}",
          f"next    {sys.executable} data/tokenize_text.py ... --tokenizer {options.out}; ./train_gpt --tokenizer {options.out} "
          f"--vocab-size {size} ...", sep="\n")
    if size < options.vocab_size:
        print(f"train_tokenizer.py: notice: the text has no more pairs that occur {options.min_frequency} times: "
              f"{size:,} tokens instead of {options.vocab_size:,}; more text, or a lower --min-frequency, gives more",
              file=sys.stderr)


if __name__ == "__main__":
    # The library does not return to Python while it learns; nothing is written before.
    run_program("train_tokenizer.py", main, signal.SIG_DFL)
