"""Finds the input files, splits them into documents, in chunks of bounded size, and draws documents for validation.

A worker tokenizes one chunk at a time. Chunk boundaries depend on the files alone, never on the number
of workers, and a worker needs nothing but its chunk.
"""

import codecs
import collections
import dataclasses
import glob
import gzip
import hashlib
import json
import os
import sys
import zlib

from columns import SUFFIXES as COLUMN_SUFFIXES
from columns import Column, is_columns
from programs import DataError

CHUNK_BYTES = 1 << 20   # a document of this size or more is tokenized in pieces
DRAWN_AT_LEAST = 32     # documents, or blocks of long documents, to expect in a validation set

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md")
# What a folder stands for, also with .gz. Not .json: among texts that is more often something else.
FOLDER_SUFFIXES = TEXT_SUFFIXES + (".jsonl", ".ndjson") + COLUMN_SUFFIXES
RECORD = ".tokenized.json"   # of ./train_gpt --tokenize, beside its shards
NOT_TEXT = 0.005   # a file with a larger share of bytes that are NUL or not UTF-8 is no text

GZIP = b"\x1f\x8b"   # read; these are not: magic bytes, kind, remedy
NOT_READ = {
    b"\x28\xb5\x2f\xfd": ("zstd", "decompress it: zstd -d"), b"\xfd7zXZ": ("xz", "decompress it: xz -d"),
    b"BZh": ("bzip2", "decompress it: bunzip2"), b"PK\x03\x04": ("zip", "decompress it: unzip"),
    b"PAR1": ("Parquet", "--format auto reads it"), b"ARROW1": ("Arrow", "--format auto reads it"),
}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A section of one file: whole JSONL lines, or text cut at a document's end or at a safe place within one.

    The documents of a JSON list and the rows of a table are lines of JSON.
    """
    path: str
    line: int            # number of the first line, document or row, from 1
    is_json: bool
    new_document: bool   # text: the first byte begins a document; otherwise it continues the last chunk's
    data: bytes
    unit: str = ""       # what is numbered, if not lines

    def where(self, number):
        return f"{self.path}: {self.unit} {number}" if self.unit else f"{self.path}:{number}"


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
        text, line, begin = piece.text, piece.line, 0
        while begin < len(text):
            rest = len(text) - begin
            end = begin + (rest if rest <= self.block else _cut_inside(text[begin:begin + self.block + 1], self.block))
            yield Piece(piece.path, line, piece.new_document and begin == 0, text[begin:end])
            line, begin = line + text.count(b"\n", begin, end), end


def find_files(names, form="auto"):
    """Regular files and pipes that `names` (files, globs, folders) match, in order; DataError if a name matches none.

    A folder stands for the files below it with FOLDER_SUFFIXES, also .gz, hidden ones left out, links to folders
    followed; notices on stderr name the others, and files that several names match. Globs, which leave out records of
    --tokenize, and folders expand in sorted order. DataError: compressed with another program than gzip, no text, or a
    folder that cannot be read. form: --format.
    """
    paths = []
    for name in names:
        if os.path.isdir(name):
            found, skipped = _walk(name)
            remedy = f"no {' '.join(FOLDER_SUFFIXES)} file below this folder, also none with .gz; name the files with a glob"
            if skipped and found:
                print(f"notice: {name}: {_kinds(skipped)} skipped, no text, JSONL, Parquet or Arrow by the name; name a file "
                      "itself to read it", file=sys.stderr)
            elif skipped:
                remedy += f"; there are {_kinds(skipped)}"
        elif os.path.exists(name):
            found, remedy = [name], ""
        else:
            found = sorted(path for path in glob.glob(name, recursive=True)
                           if not os.path.isdir(path) and not path.endswith(RECORD))
            remedy = "the pattern matches no file" if glob.has_magic(name) else "no such file"
        if not found:
            raise DataError(f"{name}: {remedy}")
        paths += found
    seen = set()
    again = [path for path in paths if (identity := file_identity(path)) in seen or seen.add(identity)]
    if again:
        print(f"notice: {_kinds(list(dict.fromkeys(again)))} named more than once, and read that many times", file=sys.stderr)
    for path in paths:
        if os.path.isfile(path) and kind_of(path, form) != "columns":   # a pipe can be read only once
            with _opened(path) as file:
                _refuse_binary(file.read(CHUNK_BYTES), path)
    return paths


def file_identity(path):
    """Equal for all names of a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def kind_of(path, form):
    """"text", "json" (JSONL, or a JSON list) or "columns"; form: what --format says."""
    if form != "auto":
        return "json" if form == "jsonl" else form
    if is_columns(path):
        return "columns"
    return "json" if _plain_name(path).endswith(JSON_SUFFIXES) else "text"


def text_bytes(path, kind, field):
    """The size of a file, decompressed, or of its column `field`; None: a pipe. DataError: damaged gzip data."""
    if not os.path.isfile(path):
        return None
    if kind == "columns":
        return Column(path, field).bytes()
    with _opened(path) as file:
        if not isinstance(file, _Decompressed):
            return os.path.getsize(path)
        return sum(map(len, iter(lambda: file.read(CHUNK_BYTES), b"")))


def read_chunks(path, kind, separator, field="text"):
    """Yields the chunks of a file in order; holds a few megabytes, or the longest JSONL line or document of a JSON list.

    `separator`: bytes between the documents of a text file, None if it is one document; `field`: the column. OSError:
    unreadable. DataError: no text, or damaged.
    """
    if kind == "columns":
        yield from _column_chunks(path, field)
        return
    with _opened(path) as file:
        if kind == "text":
            yield from _text_chunks(file, path, separator)
        elif _plain_name(path).endswith(".json") and file.peek(CHUNK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _list_chunks(file, path)
        else:
            yield from _json_chunks(file, path)


def documents(chunk, separator, json_field):
    """Yields the non-empty pieces of a chunk. DataError names the file and line that is not a document."""
    line = chunk.line
    if chunk.is_json:
        for number, row in enumerate(chunk.data.split(b"\n"), line):
            if row.strip():
                text = _json_text(row, json_field, chunk.where(number))
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
    """The files to read below a folder, and the others; sorted. Links to folders are followed to those that are not below
    it by their own names. DataError: a folder that cannot be read."""
    found, skipped, seen, roots = [], [], set(), [folder]

    def refuse(error):
        raise DataError(f"{error.filename}: this folder cannot be read: {error.strerror}; allow it, or name the files to read"
                        ) from None

    for root in roots:   # which links add to
        for parent, folders, files in os.walk(root, onerror=refuse):
            if file_identity(parent) in seen:
                folders.clear()
                continue
            seen.add(file_identity(parent))
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "lost+found")
            roots += (path for path in (os.path.join(parent, name) for name in folders) if os.path.islink(path))
            for name in files:
                if not name.startswith("."):
                    (found if _plain_name(name).endswith(FOLDER_SUFFIXES) else skipped).append(os.path.join(parent, name))
    return sorted(found), sorted(skipped)


def _kinds(paths, named=3):
    """"5 files (3 .parquet, 2 .json: a.json, b.json, c.parquet, ...)"."""
    kinds = collections.Counter(os.path.splitext(path)[1] or "without suffix" for path in paths)
    return (f"{len(paths):,} file{'s' * (len(paths) > 1)} ({', '.join(f'{n:,} {kind}' for kind, n in kinds.most_common(5))}: "
            f"{', '.join(paths[:named])}{', ...' * (len(paths) > named)})")


def _plain_name(path):
    """In small letters, without .gz."""
    return path.lower().removesuffix(".gz")


class _Decompressed(gzip.GzipFile):
    """A gzip file whose damage is a DataError."""

    def __init__(self, file, path):
        super().__init__(fileobj=file, mode="rb")
        self.path, self.compressed = path, file

    def read(self, size=-1):
        return self._checked(super().read, size)

    def readline(self, size=-1):
        return self._checked(super().readline, size)

    def peek(self, n):
        return self._checked(super().peek, n)

    def _checked(self, action, size):
        try:
            return action(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.path}: damaged gzip data ({error}); expected a whole file: get it again") from None

    def close(self):
        super().close()
        self.compressed.close()


def _opened(path):
    """The file, decompressed if it is a gzip file. DataError: compressed with another program."""
    file = open(path, "rb")
    start = file.peek(8)
    if start.startswith(GZIP):
        return _Decompressed(file, path)
    for magic, (kind, remedy) in NOT_READ.items():
        if start.startswith(magic):
            file.close()
            raise DataError(f"{path}: a {kind} file, expected text or JSONL; {remedy}")
    return file


def _refuse_binary(data, path):
    """DataError if `data`, the first bytes of a file, is no UTF-8 text."""
    nul = data.count(b"\0")
    invalid = data.decode(errors="replace").count("\ufffd") - data.count("\ufffd".encode())
    if len(data) == CHUNK_BYTES:
        invalid -= min(invalid, 3)   # the last character may be cut
    if nul + invalid <= NOT_TEXT * len(data):
        return
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):   # before UTF-16, whose mark that of UTF-32 begins with
        found, remedy = "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8"
    elif data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found, remedy = "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"
    elif nul:
        found, remedy = f"a binary file, {nul / len(data):.1%} of its first bytes are NUL", "name text files only"
    else:
        found = f"text of which {invalid / len(data):.1%} of the first bytes are not UTF-8"
        remedy = "convert it (iconv -f WINDOWS-1252 -t UTF-8, if it is Western European text), or name text files only"
    raise DataError(f"{path}: found {found}; expected text in UTF-8; {remedy}")


def _json_chunks(file, path):
    line = 1
    while data := file.read(CHUNK_BYTES) + file.readline():   # up to the end of a line
        yield Chunk(path, line, True, True, data)
        line += data.count(b"\n")


def _column_chunks(path, field):
    rows, size, first = [], 0, 1
    for text in Column(path, field).texts():
        rows.append(json.dumps({field: text}, ensure_ascii=False).encode())
        size += len(rows[-1])
        if size >= CHUNK_BYTES:
            yield Chunk(path, first, True, True, b"\n".join(rows), "row")
            first, rows, size = first + len(rows), [], 0
    if rows:
        yield Chunk(path, first, True, True, b"\n".join(rows), "row")


def _list_chunks(file, path):
    """The documents of a JSON list, each as a line of JSON."""
    decoder, parse = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, number, first, rows, size, ended = "", 0, 0, 1, [], 0, False

    def skip_blanks():
        nonlocal text, at, ended
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or ended:
                return text[at:at + 1]
            read_more()

    def read_more():
        nonlocal text, at, ended
        block = file.read(max(CHUNK_BYTES, len(text) - at))   # doubled: else a long document would cost a square
        try:
            text, at, ended = text[at:] + decoder.decode(block, not block), 0, not block
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: document {number + 1}: byte {error.object[error.start]:#04x} is not UTF-8; convert "
                            "the file to UTF-8") from None

    assert skip_blanks() == "["
    at += 1
    more = skip_blanks() != "]"
    while more:
        number += 1
        skip_blanks()
        while True:
            try:
                value, end = parse(text, at)
                break
            except (ValueError, RecursionError) as error:
                cut = isinstance(error, json.JSONDecodeError) and (error.pos > len(text) - 16 or
                                                                   "Unterminated" in error.msg)
                if ended and cut and ("Unterminated" in error.msg or error.pos >= len(text.rstrip())):
                    raise DataError(f"{path}: ends within document {number}: the file is cut off; get it again") from None
                if ended or not cut:
                    raise DataError(f"{path}: document {number}: not a JSON value ({getattr(error, 'msg', error)}): "
                                    f"{_excerpt(text[at:at + 50].encode(errors='replace'))}; expected a list of objects "
                                    "(--format text reads the file as plain text)") from None
                read_more()
        at = end
        rows.append(json.dumps(value).encode())
        size += len(rows[-1])
        if size >= CHUNK_BYTES:
            yield Chunk(path, first, True, True, b"\n".join(rows), "document")
            first, rows, size = number + 1, [], 0
        mark = skip_blanks()
        if mark not in (",", "]"):
            if not mark:
                raise DataError(f"{path}: ends after document {number}, within the list: the file is cut off; get it "
                                "again")
            found = _excerpt(text[at:at + 50].encode(errors="replace"))
            raise DataError(f"{path}: document {number}: the list goes on with {found}, expected , or ]")
        at += 1
        more = mark == ","
    if not number:
        at += 1
    if skip_blanks():
        found = _excerpt(text[at:at + 50].encode(errors="replace"))
        raise DataError(f"{path}: text after the list of {number} documents: {found}; expected one "
                        "list (one object per line is JSONL: name it .jsonl)")
    if rows:
        yield Chunk(path, first, True, True, b"\n".join(rows), "document")


def _text_chunks(file, path, separator):
    line, new_document, rest = 1, True, b""
    while block := file.read(CHUNK_BYTES):
        if line == 1 and new_document and not rest:
            _refuse_binary(block, path)   # of a pipe it is seen only now
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
        raise DataError(f"{where}: not a JSON value ({error}): {_excerpt(row)}; each line must hold one object, or a .json "
                        "file one list of them (--format text reads the file as plain text)") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: not a JSON object: {_excerpt(row)}; expected {{\"{field}\": \"...\"}}")
    if field not in document:
        raise DataError(f"{where}: no field '{field}', only {', '.join(map(repr, list(document)[:8])) or 'none'}; "
                        "name the text field with --json-field")
    text = document[field]
    if text is None:
        raise DataError(f"{where}: field '{field}' is null: remove such objects, or give them a text")
    if isinstance(text, list):
        raise DataError(f"{where}: field '{field}' holds a list, {_excerpt(json.dumps(text).encode())}, not a string: "
                        "write what it holds as a file of its own, one object per line")
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
