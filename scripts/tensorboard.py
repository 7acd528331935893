#!/usr/bin/env python3
"""Exports metrics.jsonl to TensorBoard event files, with the standard library alone.

    scripts/tensorboard.py out/run [out/other ...]      writes out/run/tensorboard/events.out.tfevents..., then:
    tensorboard --logdir out
    scripts/tensorboard.py out/run --follow             goes on as the run goes on

Every numeric field of a line is the scalar KIND/FIELD at its step: train/loss, train/grad_norm, val/loss ... What is null
(not finite) or half a line is left out. A second export replaces the first one's file.

Format: TFRecord (length, masked CRC-32C of the length, the record, masked CRC-32C of the record) of Event messages in
protobuf: https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto.

Exit status: 0 done, 1 refused with the reason in one line on stderr, 130 ended by Ctrl-C while following.
"""

import argparse
import json
import os
import struct
import sys
import time


def crc_table():
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)   # Castagnoli, reflected
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


# ---- Protobuf: a field is a tag (number << 3 | wire type) and a value ----------------------------


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def bytes_field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall_time, step, body):
    return record(varint(1 << 3 | 1) + struct.pack("<d", wall_time) + varint(2 << 3 | 0) + varint(step) + body)


def version_event(wall_time):
    return event(wall_time, 0, bytes_field(3, b"brain.Event:2"))


def start_event(wall_time, step):
    """SessionLog START at a step: TensorBoard forgets what it has read at this step and behind it."""
    return event(wall_time, step, bytes_field(7, varint(1 << 3 | 0) + varint(1)))


def scalar_event(wall_time, step, values):
    summary = b"".join(bytes_field(1, bytes_field(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value))
                       for tag, value in values.items())
    return event(wall_time, step, bytes_field(5, summary))


# ---- Runs ------------------------------------------------------------------------------------------


def scalars(line):
    """(step, {tag: value}) of a line of metrics.jsonl, or None if it is half a line or not one of ours."""
    try:
        fields = json.loads(line)
        kind, step = fields["kind"], fields["step"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(step, int) or step < 0:
        return None
    values = {f"{kind}/{name}": value for name, value in fields.items()
              if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3.4e38}
    return step, values


class Export:
    """One run's metrics.jsonl and the event file made of it."""

    def __init__(self, run, logdir):
        self.source = os.path.join(run, "metrics.jsonl")
        if not os.path.isfile(self.source):
            raise OSError(f"{self.source}: no such file; name the --out-dir of a run")
        os.makedirs(logdir, exist_ok=True)
        # TensorBoard knows event files by this part of the name; the number is fixed, so that an export replaces the last.
        self.target = os.path.join(logdir, "events.out.tfevents.0000000001.train_gpt")
        self.offset, self.identity, self.last_step = 0, None, -1

    def write_all(self):
        """The whole file anew. Times: the lines have none; the last one was written when the file was."""
        with open(self.source, "rb") as file:
            data = file.read()
            self.identity = os.fstat(file.fileno()).st_ino
            modified = os.fstat(file.fileno()).st_mtime
        self.offset = data.rfind(b"\n") + 1
        lines = [found for found in map(scalars, data[:self.offset].splitlines()) if found]
        left = [0.0]
        for _, values in reversed(lines):
            left.append(left[-1] + values.get("train/ms", 0.0) * 1e-3)
        begin = modified - left[-1]
        temporary = f"{self.target}.{os.getpid()}.tmp"
        with open(temporary, "wb") as out:
            out.write(version_event(begin))
            for (step, values), seconds in zip(lines, reversed(left[:-1])):
                out.write(scalar_event(modified - seconds, step, values))
        os.replace(temporary, self.target)
        self.last_step = lines[-1][0] if lines else -1
        return len(lines)

    def write_more(self):
        """What came since; after a resume, which cuts the file, first a note from which step on it is anew."""
        try:
            status = os.stat(self.source)
        except FileNotFoundError:
            return   # between two starts
        if status.st_ino != self.identity or status.st_size < self.offset:
            self.offset, self.identity = 0, status.st_ino
        with open(self.source, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[:data.rfind(b"\n") + 1]
        lines = [found for found in map(scalars, whole.splitlines()) if found]
        if lines:
            with open(self.target, "ab") as out:
                if lines[0][0] < self.last_step:
                    out.write(start_event(time.time(), lines[0][0]))
                for step, values in lines:
                    out.write(scalar_event(time.time(), step, values))
            self.last_step = lines[-1][0]
        self.offset += len(whole)


def main():
    parser = argparse.ArgumentParser(description="Exports metrics.jsonl to TensorBoard event files.")
    parser.add_argument("runs", nargs="+", metavar="OUT", help="the --out-dir of a run")
    parser.add_argument("--logdir", help="where the event files go (default: OUT/tensorboard); several runs: below it")
    parser.add_argument("--follow", action="store_true", help="go on with a running run, until Ctrl-C")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between looks, with --follow")
    options = parser.parse_args()
    exports = []
    for run in options.runs:
        logdir = options.logdir or os.path.join(run, "tensorboard")
        if options.logdir and len(options.runs) > 1:
            logdir = os.path.join(options.logdir, os.path.basename(os.path.normpath(run)))
        exports.append(Export(run, logdir))
    for export in exports:
        print(f"{export.target}: {export.write_all()} lines", flush=True)
    while options.follow:
        time.sleep(options.every)
        for export in exports:
            export.write_more()


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"tensorboard.py: error: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
