"""Writes token shards, the files that training reads, in llm.c's format.

A shard is a header of 256 little-endian int32 followed by the tokens, little-endian:

    header[0]   magic: 20240520 (uint16 tokens) or 20240801 (uint32 tokens)
    header[1]   version: 1 (uint16) or 7 (uint32)
    header[2]   n, the number of tokens; n mod 2^32 where n needs more than 32 bits
    header[3..] zero

Source of the format: write_datafile() of llm.c's dev/data/data_common.py (GPT-2 and Llama 3 forms).
"""

import array
import contextlib
import glob
import os
import re
import struct
import sys

from programs import DataError, held_signals, sync_folder, writing

HEADER_BYTES = 256 * 4
MAX_SHARDS = 1_000_000   # six digits in the file names


class TokenFormat:
    """Width of a stored token, and the header's magic and version for it."""

    def __init__(self, vocab_size):
        """`vocab_size`: number of token ids; up to 65,536 they are stored as uint16, otherwise as uint32."""
        if not 0 < vocab_size <= 1 << 32:
            raise DataError(f"a vocabulary of {vocab_size:,} tokens does not fit uint32 token ids")
        narrow = vocab_size <= 1 << 16
        self.magic, self.version, self.width = (20240520, 1, 2) if narrow else (20240801, 7, 4)
        self.typecode = next(code for code in "HIL" if array.array(code).itemsize == self.width)

    def header(self, count):
        """The 1024 bytes in front of `count` tokens."""
        return struct.pack("<256I", self.magic, self.version, count % (1 << 32), *[0] * 253)

    def pack(self, ids):
        """The token ids (an iterable of int) as stored in a shard. OverflowError: an id does not fit."""
        tokens = array.array(self.typecode, ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tobytes()

    def unpack(self, packed):
        """The inverse of pack()."""
        tokens = array.array(self.typecode)
        tokens.frombytes(packed)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tolist()


def shard_path(prefix, split, index):
    """Name of shard `index` of a split: PREFIX_train_000000.bin."""
    return f"{prefix}_{split}_{index:06d}.bin"


def existing_shards(prefix):
    """Paths of the existing shards of `prefix`, of both splits, sorted."""
    numbered = re.compile(re.escape(os.path.basename(prefix)) + r"_(train|val)_\d{6}\.bin")
    return sorted(path for path in glob.glob(glob.escape(prefix) + "_*.bin")
                  if numbered.fullmatch(os.path.basename(path)))


class ShardWriter:
    """Writes one split as shards of `shard_size` tokens, under temporary names until publish().

    The caller holds the lock of `prefix`: files with these names are what a run left that was killed, and are removed.
    """

    def __init__(self, prefix, split, token_format, shard_size, first=0):
        """`first`: the number of the first shard."""
        self.prefix, self.split, self.format, self.shard_size = prefix, split, token_format, shard_size
        self.first = first
        self.count = 0     # tokens in all shards
        self.shards = 0    # shards begun; all but the last are full
        self._file = None  # the last shard, while it is open
        self.discard()

    def final_paths(self):
        return [shard_path(self.prefix, self.split, self.first + i) for i in range(self.shards)]

    def append(self, packed):
        """Appends tokens in packed form (TokenFormat.pack)."""
        packed = memoryview(packed)
        while packed:
            room = self.shards * self.shard_size - self.count   # in the last shard
            if room == 0:
                self._begin_shard()
                continue
            part = packed[:room * self.format.width]
            with self._writing(self.shards - 1):
                self._file.write(part)
            self.count += len(part) // self.format.width
            packed = packed[len(part):]

    def finish(self):
        """Writes the headers and syncs the shards to disk, still under their temporary names."""
        self._close()
        for index in range(self.shards):
            count = min(self.shard_size, self.count - index * self.shard_size)
            with self._writing(index), open(self._temporary_path(index), "r+b") as shard:
                shard.write(self.format.header(count))
                shard.flush()
                os.fsync(shard.fileno())

    def publish(self):
        """Renames the finished shards to their final names, replacing existing ones."""
        for index, path in enumerate(self.final_paths()):
            os.replace(self._temporary_path(index), path)

    def discard(self):
        """Removes every temporary file of this writer; harmless after publish()."""
        with contextlib.suppress(DataError):   # closing flushes, which fails again on a full disk
            self._close()
        for path in glob.glob(glob.escape(self._temporary_stem()) + "*"):
            with contextlib.suppress(OSError):
                os.remove(path)

    def _begin_shard(self):
        self._close()
        if self.shards == MAX_SHARDS:
            raise DataError(f"more than {MAX_SHARDS:,} shards of {self.shard_size:,} tokens: raise --shard-size")
        with self._writing(self.shards):
            self._file = open(self._temporary_path(self.shards), "wb")
            self._file.write(bytes(HEADER_BYTES))   # no magic: not a valid shard until finish()
        self.shards += 1

    def _close(self):
        if self._file is not None:
            file, self._file = self._file, None
            with self._writing(self.shards - 1):
                file.close()

    def _writing(self, index):
        return writing(shard_path(self.prefix, self.split, self.first + index),
                       lambda: f", after {self.count:,} tokens of {self.format.width} bytes; nothing was left of this run, "
                               "earlier shards are unchanged")

    def _temporary_stem(self):
        folder, name = os.path.split(self.prefix)
        return os.path.join(folder, f".{name}_{self.split}.tmp-")

    def _temporary_path(self, index):
        return f"{self._temporary_stem()}{index:06d}"


def publish(writers, standing=()):
    """Gives the writers' shards their names, then removes those of `standing`, the shards of an earlier run, that they do
    not replace.

    Whatever can run out of space is done before the first shard is replaced, and signals wait until all is done. After
    kill -9 or a crash some shards may be of this run and some of the earlier one; each is whole.
    """
    for writer in writers:
        writer.finish()
    fresh = {path for writer in writers for path in writer.final_paths()}
    with held_signals():
        for writer in writers:
            writer.publish()
        for path in standing:
            if path not in fresh:   # a glob for the new shards must not match old ones
                os.remove(path)
        for writer in writers:
            sync_folder(os.path.dirname(writer.prefix))
