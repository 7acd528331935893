"""Finds the input files, splits them into documents, in chunks of bounded size, and draws documents for validation.

A worker tokenizes one chunk at a time. Chunk boundaries depend on the files alone, never on the number
of workers, and a worker needs nothing but its chunk.
"""

import dataclasses
import glob
import hashlib
import json
import os
import sys

from token_shards import DataError

CHUNK_BYTES = 1 << 20   # a document of this size or more is tokenized in pieces
DRAWN_AT_LEAST = 32     # documents, or blocks of long documents, to expect in a validation set

JSON_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md")

# Magic bytes of compressed files.
PACKED = {
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2",
    b"PK\x03\x04": "zip", b"PAR1": "parquet",
}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A section of one file: whole JSONL lines, or text cut at a document's end or at a safe place within one."""
    path: str
    line: int            # number of the first line, from 1
    is_json: bool
    new_document: bool   # text: the first byte begins a document; otherwise it continues the last chunk's
    data: bytes


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document, or the next part of a long one."""
    path: str
    line: int
    new_document: bool
    text: bytes          # UTF-8 if from JSON, else as in the file


@dataclasses.dataclass(frozen=True)
class Draw:
    """Which documents are for validation: `fraction` of them, by a hash of their text and `seed`.

    So they come from all of the input, equal documents are on the same side, and a document stays on its side when
    others are added, unless it is long: one of more than `block` bytes, such as the only one, is drawn in blocks.
    """
    fraction: float
    seed: int
    block: int

    @classmethod
    def of(cls, fraction, seed, total_bytes):
        """`total_bytes`: of the input, None if unknown."""
        if fraction == 0:
            return cls(0, seed, sys.maxsize)
        size = CHUNK_BYTES if total_bytes is None else int(total_bytes * fraction) // DRAWN_AT_LEAST
        return cls(fraction, seed, max(size, 64))

    def takes(self, text):
        """Whether this document or block is for validation."""
        digest = hashlib.blake2b(text, digest_size=8, key=b"%d" % self.seed).digest()
        return int.from_bytes(digest, "little") < self.fraction * 2**64

    def blocks(self, piece):
        """Cuts a piece into pieces of at most `block` bytes."""
        text, line, new_document = piece.text, piece.line, piece.new_document
        while text:
            end = len(text) if len(text) <= self.block else _cut_inside(text, self.block)
            yield Piece(piece.path, line, new_document, text[:end])
            line, new_document, text = line + text.count(b"\n", 0, end), False, text[end:]


def find_files(names):
    """Regular files and pipes that `names` (files, globs, folders) match, in order; DataError if a name matches none.

    A folder stands for the .txt, .text, .md, .jsonl and .ndjson files below it, hidden folders left out.
    Globs and folders expand in sorted order.
    """
    paths = []
    for name in names:
        if os.path.isdir(name):
            found = sorted(_walk(name))
            remedy = f"no {' '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} file below this folder; name the files with a glob"
        elif os.path.exists(name):
            found, remedy = [name], ""
        else:
            found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
            remedy = "the pattern matches no file" if glob.has_magic(name) else "no such file"
        if not found:
            raise DataError(f"{name}: {remedy}")
        paths += found
    for path in paths:
        _refuse_packed(path)
    return paths


def read_chunks(path, is_json, separator):
    """Yields the chunks of a file in order; holds a few megabytes, or the longest JSONL line.

    `separator`: bytes between the documents of a text file, None if it is one document. OSError: unreadable.
    """
    with open(path, "rb") as file:
        yield from _json_chunks(file, path) if is_json else _text_chunks(file, path, separator)


def documents(chunk, separator, json_field):
    """Yields the non-empty pieces of a chunk. DataError names the file and line that is not a document."""
    line = chunk.line
    if chunk.is_json:
        for number, row in enumerate(chunk.data.split(b"\n"), line):
            if row.strip():
                text = _json_text(row, json_field, f"{chunk.path}:{number}")
                if text:
                    yield Piece(chunk.path, number, True, text)
        return
    new_document = chunk.new_document
    for text in chunk.data.split(separator) if separator else [chunk.data]:
        if text:
            yield Piece(chunk.path, line, new_document, text)
        line += (text + (separator or b"")).count(b"\n")
        new_document = True


def _walk(folder):
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.endswith(TEXT_SUFFIXES + JSON_SUFFIXES) and not name.startswith("."):
                yield os.path.join(parent, name)


def _refuse_packed(path):
    if not os.path.isfile(path):
        return   # a pipe can be read only once
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, kind in PACKED.items():
        if start.startswith(magic):
            raise DataError(f"{path}: a {kind} file, not text; unpack it to text or JSONL first")


def _json_chunks(file, path):
    line = 1
    while data := file.read(CHUNK_BYTES) + file.readline():   # up to the end of a line
        yield Chunk(path, line, True, True, data)
        line += data.count(b"\n")


def _text_chunks(file, path, separator):
    line, new_document, rest = 1, True, b""
    while block := file.read(CHUNK_BYTES):
        rest += block
        if len(rest) < CHUNK_BYTES:
            break   # the end of the file
        end, complete = _last_cut(rest, separator)
        yield Chunk(path, line, False, new_document, rest[:end])
        line += rest.count(b"\n", 0, end)
        new_document, rest = complete, rest[end:]
    if rest:
        yield Chunk(path, line, False, new_document, rest)


def _last_cut(data, separator):
    """(length of the chunk to cut off the front of `data`, whether a document ends there)."""
    if not separator:
        return _cut_inside(data, len(data) - 1), False
    unfinished = len(data.split(separator)[-1])   # split, not rfind: "\n\n\n" is "\n\n", then "\n"
    if unfinished < len(data):
        return len(data) - unfinished, True
    return _cut_inside(data, len(data) - len(separator)), False   # the end may hold part of a separator


def _cut_inside(data, limit):
    """The best position up to `limit` for a cut, where tokens are least likely to straddle it.

    Best before a line that begins with a letter or symbol, then before a single space: no token of GPT-2's or
    Llama 3's pre-tokenizer crosses these. In text without either, between two UTF-8 characters.
    """
    for gap, first in ((b"\n", 1), (b" ", 0)):   # a line break ends its line, a space begins its word
        at = data.rfind(gap, limit // 2, limit)
        while at > 0:
            if not data[at + 1:at + 2].isspace() and (first or not data[at - 1:at].isspace()):
                return at + first
            at = data.rfind(gap, limit // 2, at)
    at = limit
    while at > limit - 3 and data[at] & 0xC0 == 0x80:   # 10xxxxxx continues a character
        at -= 1
    return at


def _json_text(row, field, where):
    try:
        document = json.loads(row.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {row[error.start]:#04x} at column {error.start + 1} is not UTF-8; "
                        "convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a JSON value ({error}): {_excerpt(row)}; each line must hold one object "
                        "(--format text reads the file as plain text)") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: not a JSON object: {_excerpt(row)}; expected {{\"{field}\": \"...\"}}")
    if field not in document:
        raise DataError(f"{where}: no field '{field}', only {', '.join(map(repr, list(document)[:8])) or 'none'}; "
                        "name the text field with --json-field")
    text = document[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' holds {_excerpt(json.dumps(text).encode())}, not a string; "
                        "name the text field with --json-field")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field '{field}' holds the lone surrogate {text[error.start]!r}, "
                        "which is not a character; correct the line") from None


def _excerpt(data, size=40):
    text = data[:size].decode(errors="replace").strip()
    return repr(text + ("..." if len(data) > size else ""))
