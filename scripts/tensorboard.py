#!/usr/bin/env python3
"""Exports metrics.jsonl of one or several runs to TensorBoard event files, using only the standard library.

    python3 scripts/tensorboard.py out/kjv                        writes out/kjv/tensorboard/events.out.tfevents...
    python3 scripts/tensorboard.py out/a out/b --logdir out/tb    writes to out/tb/a and out/tb/b
    python3 scripts/tensorboard.py out/kjv --follow               follows the run until Ctrl-C
    tensorboard --logdir out                                      shows them

Every numeric field of a line is the scalar KIND/FIELD at its step: train/loss, train/grad_norm, train/lr, train/mfu,
val/loss ..., and val/loss/NAME for each of several validation sets, as the 32-bit floats of event files. Nulls
(non-finite values), objects without kind and step, and an incomplete last line are skipped. A new export replaces the
previous one.

Exit status: 0 done, 1 refused with the reason in one line, 130 ended by Ctrl-C.
"""
import argparse
import datetime
import json
import os
import re
import struct
import sys
import time


def fail(message):
    sys.exit(f"tensorboard.py: {message}")


def unreadable(error):
    fail(f"cannot read {error.filename}: {error.strerror}; expected a run's directory or its metrics.jsonl")


# TFRecord: length, masked CRC-32C of the length, the record, masked CRC-32C of the record; little-endian.


def crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(value)
    return table


CRC_TABLE = crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


# Protobuf: a field is a tag (number << 3 | wire type) and a value. The messages are Event and SessionLog of
# TensorBoard's tensorboard/compat/proto/event.proto, and Summary of summary.proto next to it.

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, wire_type, value):
    """`value`: a number for VARINT, else its bytes."""
    if wire_type == VARINT:
        value = varint(value)
    elif wire_type == BYTES:
        value = varint(len(value)) + value
    return varint(number << 3 | wire_type) + value


def event(wall_time, step, body):
    return record(field(1, FIXED64, struct.pack("<d", wall_time)) + field(2, VARINT, step) + body)


def opening(wall_time):
    """The head of a file: the format's version, and SessionLog START at step 0.

    At a START TensorBoard forgets what it has read of this run at that step and behind it, in this file and in those
    whose names sort before; that is how a file of ours supersedes the one before also in a TensorBoard that is looking
    at both. Its Python reader takes the first START of a run for the run's beginning and purges at later ones only:
    therefore every file has one, the first one too. Its Rust reader has no eye for START; there a point takes the place
    of those of its tag at the same and later steps, and as our files hold a run from its beginning, that comes to the
    same (but for a tag that does not come again: it goes when TensorBoard starts again).
    """
    return event(wall_time, 0, field(3, BYTES, b"brain.Event:2")) + event(
        wall_time, 0, field(7, BYTES, field(1, VARINT, 1)))


def scalar_event(wall_time, step, values):
    summary = b"".join(
        field(1, BYTES, field(1, BYTES, tag.encode(errors="replace")) + field(2, FIXED32, struct.pack("<f", value)))
        for tag, value in values.items())
    return event(wall_time, step, field(5, BYTES, summary))


# The lines of metrics.jsonl, and their times.

FLOAT_MAX = (2 - 2**-23) * 2.0**127


def stamp(entry):
    """The time of an object, as seconds since 1970; None in files of older versions."""
    try:
        return datetime.datetime.fromisoformat(entry["time"].replace("Z", "+00:00")).timestamp()
    except (KeyError, AttributeError, ValueError):
        return None


def scalars(entry):
    """(step, {tag: value}, time) of an object of metrics.jsonl; None if it has nothing to show."""
    kind, step = entry.get("kind"), entry.get("step")
    if not isinstance(kind, str) or type(step) is not int or not 0 <= step < 2**63:
        return None
    fields = list(entry.items())
    for group, prefix in (("losses", "loss"), ("ema", "ema")):   # of several validation sets; of the averages of weights
        named = entry.get(group)
        fields += [(f"{prefix}/{name}", value) for name, value in named.items()] if isinstance(named, dict) else []
    values = {f"{kind}/{name}": value for name, value in fields
              if name != "step" and type(value) in (int, float) and abs(value) <= FLOAT_MAX}
    return (step, values, stamp(entry)) if values else None


def parse(path, data, number):
    """The points in `data`, which begins at line `number` of the file, and the number of bytes consumed."""
    *lines, last = data.split(b"\n")
    points, used = [], len(data) - len(last)
    for number, line in enumerate(lines, number):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            fail(f"{path}, line {number}: not a JSON object: {line[:60].decode(errors='replace')!r}")
        points.append(scalars(entry))
    try:
        entry = json.loads(last)  # newline missing: an incomplete object does not parse
    except ValueError:
        entry = None
    if isinstance(entry, dict):
        points.append(scalars(entry))
        used = len(data)
    return [point for point in points if point], used


def timed(points, modified):
    """(wall time, step, values) of each point. Lines without a time, of older versions, have step durations; then the
    last line's time is the file's."""
    times, now = [], modified
    for _, values, own in reversed(points):
        now = now if own is None else own
        times.append(now)
        now -= max(0.0, values.get("train/ms", 0.0)) * 1e-3
    return [(wall_time, step, values) for wall_time, (step, values, _) in zip(reversed(times), points)]


class Export:
    """One run's metrics.jsonl and its event file."""

    NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.train_gpt")  # TensorBoard looks for "tfevents"

    def __init__(self, run, logdir):
        self.source = os.path.join(run, "metrics.jsonl") if os.path.isdir(run) else run
        self.logdir = logdir
        self.target = None  # the event file, once there is one
        self.size = 0  # bytes in it
        self.inode = None  # of the file that was read; a resume replaces the file
        self.offset = 0  # bytes of it exported so far
        self.lines = 0  # newlines among them
        self.seen = b""  # the last of them

    def read(self, start):
        """The bytes from `start` on, and the file's status. Raises FileNotFoundError."""
        try:
            with open(self.source, "rb") as file:
                file.seek(start)
                return file.read(), os.fstat(file.fileno())
        except FileNotFoundError:
            raise
        except OSError as error:
            unreadable(error)

    def advance(self, data, used):
        self.offset += used
        self.lines += data.count(b"\n", 0, used)
        self.seen = (self.seen + data[:used])[-256:]

    def begin(self):
        """Writes the whole run to a new event file that replaces earlier ones. Returns the number of lines."""
        data, status = self.read(0)
        points, used = parse(self.source, data, 1)
        self.inode, self.offset, self.lines, self.seen = status.st_ino, 0, 0, b""
        self.advance(data, used)
        points = timed(points, status.st_mtime)
        body = opening(points[0][0] if points else status.st_mtime) + b"".join(scalar_event(*point) for point in points)
        temporary = os.path.join(self.logdir, f".tmp-export-{os.getpid()}")
        try:
            os.makedirs(self.logdir, exist_ok=True)
            earlier = [match for name in os.listdir(self.logdir) if (match := self.NAME.fullmatch(name))]
            # A new name that sorts last: a running TensorBoard moves on only to files that sort later.
            serial = max([int(time.time()), *(int(match[1]) + 1 for match in earlier)])
            self.target = os.path.join(self.logdir, f"events.out.tfevents.{serial:010d}.train_gpt")
            try:
                with open(temporary, "wb") as out:
                    out.write(body)
                os.replace(temporary, self.target)
            finally:
                if os.path.exists(temporary):
                    os.remove(temporary)
            for match in earlier:
                retire(os.path.join(self.logdir, match[0]))
        except OSError as error:
            fail(f"cannot write to {self.logdir}: {error.strerror}; choose another directory with --logdir")
        self.size = len(body)
        return len(points)

    def go_on(self):
        """Appends new lines. True if the file was truncated or replaced, as by a resume, and exported again. Raises
        FileNotFoundError if the run has not started yet, or is restarting."""
        if self.target is None:
            self.begin()
            return True
        data, status = self.read(self.offset - len(self.seen))
        # A truncated file is shorter or, if it grew again, has different bytes before our offset.
        if status.st_ino != self.inode or not data.startswith(self.seen):
            self.begin()
            return True
        data = data[len(self.seen):]
        points, used = parse(self.source, data, self.lines + 1)
        self.advance(data, used)
        body = b"".join(scalar_event(*point) for point in timed(points, status.st_mtime))
        try:
            with open(self.target, "r+b") as out:  # does not create: a file without its head is invalid
                if out.seek(0, os.SEEK_END) != self.size:
                    fail(f"{self.target} has changed; another export of this run replaced it")
                out.write(body)
        except OSError as error:
            fail(f"cannot write {self.target}: {error.strerror}")
        self.size += len(body)
        return False


def retire(path):
    """Truncates an earlier event file. A TensorBoard that reads it reopens it by name each time, and would not move on
    to the next one if it were gone; after an hour it has moved on."""
    status = os.stat(path)
    if status.st_size > 0:
        os.truncate(path, 0)
    elif status.st_mtime < time.time() - 3600:
        os.remove(path)


def seconds(text):
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError
    return value


def exports(runs, logdir, follow):
    """An Export for each run, all checked before any is written."""
    found = []
    for run in runs:
        directory = run if os.path.isdir(run) else os.path.dirname(run)
        to = logdir or os.path.join(directory, "tensorboard")
        if logdir and len(runs) > 1:
            to = os.path.join(logdir, os.path.basename(os.path.abspath(directory)))
        export = Export(run, to)
        for other in found:
            if os.path.realpath(other.logdir) == os.path.realpath(to):
                fail(f"{other.source} and {export.source} would both go to {to}; export them one by one, each with its "
                     "own --logdir")
        if not follow or not os.path.isdir(run):  # a run that is starting has a directory but no metrics yet
            points, _ = parse(export.source, export.read(0)[0], 1)
            if not points and not follow:
                fail(f"{export.source}: no line with numbers; has the run completed its first step?")
        found.append(export)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail  # one line and status 1, like all other errors
    parser.add_argument("runs", nargs="+", metavar="OUT", help="run directories or metrics.jsonl files")
    parser.add_argument("--logdir", help="output (default: OUT/tensorboard); one subdirectory per run if several")
    parser.add_argument("--follow", action="store_true", help="keep following a running run until Ctrl-C")
    parser.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS",
                        help="between checks of the file (default: %(default)s)")
    options = parser.parse_args()

    found = exports(options.runs, options.logdir, options.follow)
    for export in found:
        try:
            count = export.begin()
        except FileNotFoundError:
            if not options.follow:
                raise
            print(f"tensorboard: waiting for {export.source}", flush=True)
            continue
        print(f"tensorboard: {export.target}: {count} lines", flush=True)
    while options.follow:
        time.sleep(options.every)
        for export in found:
            try:
                if export.go_on():
                    print(f"tensorboard: {export.target}: exported again", flush=True)
            except FileNotFoundError:
                continue


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except FileNotFoundError as error:
        unreadable(error)
