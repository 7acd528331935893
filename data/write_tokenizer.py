#!/usr/bin/env python3
"""Writes a tokenizer's vocabulary as llm.c's gpt2_tokenizer.bin, with which the trainer prints samples.

    python3 data/write_tokenizer.py gpt2 data/gpt2_tokenizer.bin
    python3 data/write_tokenizer.py tokenizer.json data/gpt2_tokenizer.bin

Format: 256 little-endian uint32, {20240328, 2, number of tokens, end-of-text token}; then for each token a length byte
and its bytes. Source: write_tokenizer() of llm.c's train_gpt2.py.

Exit status: 0 done, 1 refused or failed with the reason in one line on stderr, 128+n ended by signal n.
"""

import argparse
import struct
import sys

sys.dont_write_bytecode = True   # data/ holds data
from programs import DataError, replacing, run_program   # noqa: E402
from text_tokenizers import make_tokenizer   # noqa: E402


def vocabulary_table(tokenizer):
    """The bytes of such a file. DataError: a token that stands for no bytes, or for more than 255."""
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    too_long = next((i for i, token in enumerate(tokens) if len(token) > 255), None)
    if too_long is not None:
        raise DataError(f"token {too_long} has {len(tokens[too_long])} bytes; the format allows at most 255")
    header = struct.pack("<256I", 20240328, 2, len(tokens), tokenizer.eot, *[0] * 252)
    return header + b"".join(bytes([len(token)]) + token for token in tokens)


def write_tokenizer(table, path):
    """Writes the file atomically."""
    with replacing(path, "wb") as file:
        file.write(table)


def main(arguments):
    parser = argparse.ArgumentParser(description="Writes a vocabulary as llm.c's gpt2_tokenizer.bin.")
    parser.add_argument("tokenizer", help="'gpt2', a .tiktoken file, a tokenizer.json, or 'bytes'")
    parser.add_argument("out", metavar="OUT.bin")
    parser.add_argument("--eot", metavar="TOKEN", help="end-of-text token of the tokenizer.json, if unusual")
    options = parser.parse_args(arguments)
    tokenizer = make_tokenizer(options)
    write_tokenizer(vocabulary_table(tokenizer), options.out)
    print(f"{options.out}: {tokenizer.vocab_size:,} tokens, end of text {tokenizer.eot}")


if __name__ == "__main__":
    run_program("write_tokenizer.py", main)
