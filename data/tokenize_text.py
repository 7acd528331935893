#!/usr/bin/env python3
"""Tokenizes text, JSON, Parquet or Arrow files to shards for training.

    python3 data/tokenize_text.py book.txt --out data/book
    python3 data/tokenize_text.py 'corpus/*.jsonl' --tokenizer gpt2/tokenizer.json --out data/corpus

writes OUT_train_000000.bin, OUT_val_000000.bin, ... as described in data/README.md. The end-of-text token precedes
every document, as in llm.c. The corpus is streamed: each worker takes a few megabytes of memory whatever its size, and
the shards do not depend on the number of workers.

Validation documents are drawn from all inputs by a hash of their text. A document longer than 1/32 of the validation
set, such as a single book, is drawn in blocks of this size; what follows a block of the other side begins as a document.
The neighbours of such a block are in the other split, so its loss is lower than that of another book: --val-file
measures that.

Exit status: 0 done, 1 refused or failed with the reason in one line on stderr, 128+n ended by signal n; with --native
that of ./train_gpt, 75 if the same command goes on. On failure, existing shards are unchanged and no new ones appear; a
signal acts before the first new shard has its name, or after the last.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import glob
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import typing

sys.dont_write_bytecode = True   # data/ holds data
from documents import Draw, documents, file_identity, find_files, kind_of, read_chunks, text_bytes   # noqa: E402
from programs import SIGNALS, DataError, locked, on_signals, run_program   # noqa: E402
from text_tokenizers import make_tokenizer   # noqa: E402
from token_shards import ShardWriter, existing_shards, publish   # noqa: E402

MOST_NAMES = 128_000   # bytes; Linux takes 2^17 in an argument


class Part(typing.NamedTuple):
    """The tokens of a document, or of a block of a long one."""
    new_document: bool
    drawn: bool        # for validation, if it is a block of its own
    text_bytes: int
    packed: bytes      # in shard form, without end of text
    alone: bytes       # the same if it begins like a document: some tokenizers put a space there


class Encoded(typing.NamedTuple):
    """The tokens of a chunk, and its size in the input."""
    parts: list
    chunk_bytes: int


class Encoder:
    """Turns chunks into tokens; one per worker."""

    def __init__(self, options):
        self.tokenizer = make_tokenizer(options)
        self.separator, self.json_field, self.draw = options.split_on, options.json_field, options.draw

    def encode(self, chunk):
        return Encoded([self._part(block) for piece in documents(chunk, self.separator, self.json_field)
                        for block in self.draw.blocks(piece)], len(chunk.data))

    def _part(self, block):
        packed = alone = bytes(self.tokenizer.encode(block))
        if self.tokenizer.has_prefix and not block.new_document and self.draw.fraction > 0:   # it may follow the other side
            alone = self.tokenizer.encode(dataclasses.replace(block, new_document=True))
        return Part(block.new_document, self.draw.takes(block.text), len(block.text), packed, alone)


class Splitter:
    """Divides the parts, in order, between training and validation."""

    def __init__(self, options):
        tokenizer = make_tokenizer(options)
        self.eot, self.block = tokenizer.format.pack([tokenizer.eot]), options.draw.block
        self.drawn, self.size = False, 0   # of the block that the last part belongs to
        self.documents = self.text_bytes = 0

    def divide(self, parts):
        """Yields ("train" or "val", tokens), with the end of text before each document and each change of sides."""
        for part in parts:
            continues = not part.new_document and self.size + part.text_bytes <= self.block
            drawn = self.drawn if continues else part.drawn
            begins = part.new_document or drawn != self.drawn
            self.drawn, self.size = drawn, part.text_bytes + (self.size if continues else 0)
            self.documents += part.new_document
            self.text_bytes += part.text_bytes
            yield "val" if drawn else "train", self.eot + part.alone if begins else part.packed


_encoder = None   # a worker process's own


def start_worker(options):
    global _encoder
    for number in (signal.SIGINT, signal.SIGHUP):   # of the terminal: the parent gets them too and ends the pool
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"   # one thread per worker
    _encoder = Encoder(options)


def end_with_parent():
    """A worker would wait forever for a parent that kill -9 ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(chunk):
    return _encoder.encode(chunk)


def encode_all(chunks, options):
    """Yields every chunk's Encoded in order, from options.workers processes (one: this process)."""
    if options.workers == 1:
        yield from map(Encoder(options).encode, chunks)
        return
    try:
        pool = concurrent.futures.ProcessPoolExecutor(options.workers, initializer=start_worker, initargs=(options,))
    except OSError as error:
        raise DataError(f"several workers need locks in /dev/shm: {error.strerror}; --workers 1 needs none") from None
    pending = collections.deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(encode_in_worker, chunk))
            if len(pending) > 2 * options.workers:   # enough to keep all busy; bounds the memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except concurrent.futures.process.BrokenProcessPool:
        raise DataError("a worker process died, possibly out of memory; try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """Done, rate and time left on stderr: a live bar on a terminal, else a line every five seconds."""

    def __init__(self, total_bytes, title=""):
        """`total_bytes`: size of the input; None if it includes a pipe."""
        self.total, self.done, self.tokens, self.title, self.skipped = total_bytes, 0, 0, title, 0
        self.live = sys.stderr.isatty()
        self.start = time.monotonic()
        self.next_line = self.start + (0.0 if self.live else 5.0)
        self.shown = False

    def add(self, chunk_bytes, tokens):
        self.done += chunk_bytes
        self.tokens += tokens
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line = now + (0.1 if self.live else 5.0)
            line = self._line(now - self.start)
            print(f"\r{line}\x1b[K" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)
            self.shown = True

    def skip(self, done_bytes):
        """Bytes done before the start; they do not count towards the rate."""
        self.done = self.skipped = done_bytes

    def clear(self):
        if self.live and self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, seconds):
        rate = (self.done - self.skipped) / max(seconds, 1e-3)
        tokens = f"{self.tokens / 1e6:,.1f} M tokens  " if self.tokens else ""
        line = f"{self.title}{self.done / 1e6:,.0f} MB  {tokens}{rate / 1e6:.1f} MB/s"
        if not self.total:
            return line
        share = min(self.done / self.total, 1.0)
        left = int((self.total - self.done) / max(rate, 1.0))
        bar = f"[{'#' * int(24 * share):24}] " if self.live else ""
        return f"{bar}{share:4.0%}  {line}  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def tokenize(options, train_files, val_files, standing):
    """Writes all shards; returns the lines of the summary. DataError, OSError: nothing was written."""
    tokenizer = make_tokenizer(options)
    token_format = tokenizer.format
    kinds = {path: kind_of(path, options.format) for path in train_files + val_files}
    sizes = [text_bytes(path, kinds[path], options.json_field) for path in train_files + val_files]
    progress = Progress(None if None in sizes else sum(sizes))
    options.draw = Draw.of(0 if val_files else options.val_fraction, options.val_seed, progress.total)
    writers = {split: ShardWriter(options.out, split, token_format, options.shard_size) for split in ("train", "val")}
    train, val = writers.values()
    splitter = Splitter(options)
    began = time.monotonic()
    try:
        for files in filter(None, (train_files, val_files)):
            chunks = (chunk for path in files
                      for chunk in read_chunks(path, kinds[path], options.split_on, options.json_field))
            for result in encode_all(chunks, options):
                for split, packed in splitter.divide(result.parts):
                    writers["val" if files is val_files else split].append(packed)
                progress.add(result.chunk_bytes, sum(len(part.packed) for part in result.parts) // token_format.width)
        progress.clear()
        if not splitter.text_bytes or (val_files and not (train.count and val.count)):
            raise DataError(f"no text in {' '.join(val_files if train.count else train_files)}")
        if options.draw.fraction > 0 and not (train.count and val.count):
            remedy = "more text, another --val-seed"
            if splitter.documents == 1:   # or too few blocks that differ: another seed may draw none, too
                remedy = "--split-on, which cuts it into documents" if "text" in kinds.values() else "more documents"
            raise DataError(f"--val-fraction {options.val_fraction} drew {'none' if train.count else 'all'} of the "
                            f"{splitter.documents:,} document(s), {splitter.text_bytes:,} bytes; give {remedy}, a --val-file, "
                            "or --val-fraction 0 for no validation shard")
        if appeared := set(existing_shards(options.out)).difference(standing):
            raise DataError(f"{min(appeared)} has appeared meanwhile: another program writes shards there; give another --out")
        publish([train, val], standing)
    finally:
        progress.clear()
        for writer in (train, val):
            writer.discard()
    seconds = time.monotonic() - began
    tokens = train.count + val.count
    lines = [f"documents        {splitter.documents:,}",
             f"tokens           {tokens:,} of {token_format.width} bytes ({options.tokenizer})",
             f"bytes per token  {splitter.text_bytes / tokens:.3f}",
             f"time             {seconds:.1f} s, {splitter.text_bytes / 1e6 / max(seconds, 1e-3):,.1f} MB/s"]
    for writer in (train, val):
        if paths := writer.final_paths():
            last = f" ... {paths[-1]}" if len(paths) > 1 else ""
            lines.append(f"{writer.split:16} {writer.count:,} tokens ({writer.count / tokens:.1%}) in {paths[0]}{last}")
    words = [f"-{'j' if writer is val else 'i'} {shlex.quote(f'{glob.escape(options.out)}_{writer.split}_*.bin')}"
             for writer in (train, val) if writer.count]
    words.append(f"--tokenizer {shlex.quote(options.tokenizer)}" if tokenizer.for_trainer
                 else f"--vocab-size {tokenizer.vocab_size}")
    return [*lines, f"next             ./train_gpt {' '.join(words)} ..."]


def tokenize_natively(options, train_files, val_files):
    """Has ./train_gpt --tokenize write the shards, which takes a fraction of the time."""
    program = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train_gpt")
    if not os.path.isfile(options.tokenizer) and not os.path.isdir(options.tokenizer):
        raise DataError(f"--native with --tokenizer {options.tokenizer}: name a tokenizer.json, or leave out --native")
    if options.val_fraction > 0 and not val_files:
        raise DataError(f"--native with --val-fraction {options.val_fraction}: ./train_gpt draws no documents; give a "
                        "--val-file or --val-fraction 0, or leave out --native")
    if options.split_on or options.eot or options.format != "auto":
        raise DataError("--native with --split-on, --eot or --format, which ./train_gpt does not have: leave out --native")
    if not os.path.exists(program):
        raise DataError("--native needs ./train_gpt: build it with make")
    inputs = {split: files for split, files in (("val", val_files), ("train", train_files)) if files}
    for split, files in inputs.items():
        if table := next((path for path in files if kind_of(path, "auto") == "columns"), None):
            raise DataError(f"--native with {table}: ./train_gpt reads no Parquet or Arrow files; leave out --native")
        if odd := next((path for path in files if "," in path), None):
            raise DataError(f"--native with {odd}: ./train_gpt takes this name for a list; rename the file, or leave out "
                            "--native")
        if (size := len(os.fsencode(",".join(files)))) > MOST_NAMES:
            raise DataError(f"--native with {len(files):,} files for {split}: their names take {size:,} bytes, at most "
                            f"{MOST_NAMES:,} fit into a command; join files, or leave out --native")
    stale = [] if val_files else [path for path in existing_shards(options.out) if path.startswith(f"{options.out}_val_")]
    if stale and not options.overwrite:
        raise DataError(f"{stale[0]} exists already, and now there is no --val-file; --overwrite removes it, or give another "
                        "--out")
    process, arrived = None, []

    def forward(number, _frame):
        arrived.append(number)
        if process:
            process.send_signal(number)

    on_signals(forward, (*SIGNALS, signal.SIGUSR1, signal.SIGUSR2))
    for split, files in inputs.items():
        if arrived:
            sys.exit(128 + arrived[0])
        process = subprocess.Popen(
            [program, f"--tokenize={','.join(files)}", "--tokenizer", options.tokenizer, "--out", options.out,
             "--tokenize-split", split, "--tokenize-field", options.json_field, "--shard-size", str(options.shard_size),
             "--threads", str(options.workers), *["--restart"][:options.overwrite]])
        for number in arrived:   # while it was started
            process.send_signal(number)
        if status := process.wait():
            ended = f"ended with status {status}, for the reason above" if status > 0 else f"was ended by signal {-status}"
            complete = "; the shards of --val-file are complete" if split == "train" and val_files else ""
            print(f"tokenize_text.py: ./train_gpt --tokenize {ended} (where it names --restart, give --overwrite){complete}",
                  file=sys.stderr)
            sys.exit(status if status > 0 else 128 - status)
    if stale:   # other tokens, perhaps
        for path in (*stale, f"{options.out}_val.tokenized.json"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)


def unescape(text):
    r"""The bytes of a command-line argument with the C escapes \n, \t, \r and \\."""
    meaning = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\"}
    separator = re.sub(rb"\\([ntr\\])", lambda match: meaning[match[1]], os.fsencode(text))
    if not 1 <= len(separator) <= 1000:
        raise argparse.ArgumentTypeError("expected 1 to 1000 bytes")
    return separator


def count(text):
    value = float(text) if "e" in text else int(text.replace("_", "").replace(",", ""))
    if not 1 <= value <= 1 << 40 or value != int(value):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 2^40, got {text}")
    return int(value)


def fraction(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a fraction from 0 to below 1, got {text}")
    return value


def seed(text):
    value = int(text)
    if len(str(value)) > 64:   # the bytes of Draw's key
        raise argparse.ArgumentTypeError(f"expected a whole number of at most 64 characters, got {text}")
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise DataError(f"{message}; see --help")


def add_input_options(parser):
    """How the inputs divide into documents."""
    parser.add_argument("--format", choices=("auto", "text", "jsonl", "columns"), default="auto",
                        help="auto (the default): by the suffix, also before .gz: .jsonl and .ndjson hold one JSON object "
                             "per line, .json these or one list of them; .parquet, .arrow and .feather are columns (package "
                             "pyarrow); else text")
    parser.add_argument("--json-field", default="text", metavar="NAME",
                        help="field of the text, or its column in a Parquet or Arrow file (default: text)")
    parser.add_argument("--split-on", type=unescape, metavar="SEPARATOR",
                        help=r"separates documents within a text file, e.g. '\n\n' (default: a file is a document)")


def parse_options(arguments):
    parser = Parser(prog="tokenize_text.py", allow_abbrev=False,
                    description="Tokenizes text, JSON, Parquet or Arrow files to shards PREFIX_train_000000.bin, "
                                "PREFIX_val_000000.bin.")
    parser.add_argument("inputs", nargs="+", metavar="INPUT",
                        help="text or JSON files, also compressed with gzip, Parquet or Arrow files; globs; folders (of which files "
                             "with other suffixes are skipped)")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="path and prefix of the shards' names")
    parser.add_argument("--tokenizer", default="bytes",
                        help="'bytes' (the default), 'gpt2' or a .tiktoken file (package tiktoken), or a tokenizer.json "
                             "(package tokenizers)")
    parser.add_argument("--eot", metavar="TOKEN", help="end-of-text token of the tokenizer.json, if unusual")
    add_input_options(parser)
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--val-fraction", type=fraction, default=0.05, metavar="F",
                       help="fraction of the documents to draw for validation, from all inputs, by a hash of their "
                            "text, so that equal documents are in one split; blocks of documents that are too long or "
                            "too few for that (default: 0.05; 0: none)")
    split.add_argument("--val-file", nargs="+", default=[], metavar="INPUT", help="validation files instead")
    parser.add_argument("--val-seed", type=seed, default=0, metavar="N", help="another N draws others (default: 0)")
    parser.add_argument("--shard-size", type=count, default=10**8, metavar="N", help="tokens per shard (default: 1e8)")
    parser.add_argument("--workers", type=count, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes (default: one per core)")
    parser.add_argument("--native", action="store_true",
                        help="let ./train_gpt --tokenize do it, with a tokenizer.json and without a draw")
    parser.add_argument("--overwrite", action="store_true", help="replace all existing shards of PREFIX")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse_options(arguments)
    folder, name = os.path.split(options.out)
    if not name:
        raise DataError(f"--out {options.out}: expected a prefix such as {os.path.join(folder, 'corpus')}")
    if options.eot and not os.path.exists(options.tokenizer):
        raise DataError(f"--eot needs a tokenizer.json; --tokenizer {options.tokenizer} has its own end of text")
    inputs = find_inputs(options)
    with made_folder(folder or "."), locked(f"{options.out}.lock"):
        if options.native:
            return tokenize_natively(options, *inputs)
        standing = existing_shards(options.out)
        if standing and not options.overwrite:
            raise DataError(f"{standing[0]} exists already; --overwrite replaces all shards under {options.out}")
        summary = tokenize(options, *inputs, standing)
    try:
        print(*summary, sep="\n", flush=True)
    except BrokenPipeError:   # into head, say: the shards are complete, and nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find_inputs(options):
    """The files for training, and those for validation. DataError: a file is both."""
    train_files, val_files = find_files(options.inputs, options.format), find_files(options.val_file, options.format)
    in_training = set(map(file_identity, train_files))
    for path in val_files:
        if file_identity(path) in in_training:
            raise DataError(f"{path}: used for both training and validation; remove it from one")
    return train_files, val_files


@contextlib.contextmanager
def made_folder(folder):
    """Creates a folder and its missing parents; removes those it created if the block fails."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder) or "."
    try:
        for path in reversed(missing):
            os.mkdir(path)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                os.rmdir(path)
        raise


if __name__ == "__main__":
    run_program("tokenize_text.py", main)
