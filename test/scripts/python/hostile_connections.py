#!/usr/bin/env python3
"""Connects to a process of a job as strangers might, in every wrong way, and says how each connection ended.

  test/scripts/python/hostile_connections.py HOST PORT [--seed N] [--count N] [--at-once N] [--patience SECONDS]
      [--other-user UID --to PROCESS --ranks N]

With TRAIN_GPT_TOKEN the replayed connections are recordings of one that knew the token; without it, of one that did
not. With --other-user all connections are those of that user to a job without a token of N processes of one rank each:
they know everything that one of its processes knows. Exits with status 1 if one was believed, or was still open after --patience seconds (0: do not look).
"""
import argparse
import collections
import concurrent.futures.thread
import encodings.idna  # both now: another user may not read the library
import hashlib
import hmac
import os
import random
import socket
import struct
import sys
import time

MAGIC = b"traingpt"
CONTROL, DATA = 1, 2
WELCOME, WRONG_TOKEN, OTHER_USER = 0, 1, 7
REPLY_BYTES, VERDICT_BYTES = 48, 36


def hello(rng, version=1, purpose=CONTROL, to=0, numbers=(1, 0, 0), job=bytes(16)):
    return MAGIC + struct.pack("<IIi3i", version, purpose, to, *numbers) + job + rng.randbytes(16)


def proof(token, said, reply):
    return hmac.new(token.encode(), b"train_gpt c" + struct.pack("<I", 0) + said + reply, hashlib.sha256).digest()


def receive(s, n):
    data = b""
    while len(data) < n:
        part = s.recv(n - len(data))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


class Hostile:
    def __init__(self, arguments):
        self.at, self.patience = (arguments.host, arguments.port), arguments.patience
        self.token = os.environ.get("TRAIN_GPT_TOKEN", "")
        self.to, self.ranks = arguments.to, arguments.ranks
        if arguments.other_user is None:
            self.record(random.Random(arguments.seed))
        else:
            os.setuid(arguments.other_user)
            self.kinds = [Hostile.joins, Hostile.sends_data]

    def record(self, rng):
        """A handshake to be replayed: nobody has rank 2^31 - 1, so even with the token it opens nothing."""
        self.said = hello(rng, purpose=DATA, numbers=(0, 0, 2**31 - 1))
        self.proof = rng.randbytes(32)
        if self.token:
            with socket.create_connection(self.at, 5) as s:
                s.sendall(self.said)
                self.proof = proof(self.token, self.said, receive(s, REPLY_BYTES))
                s.sendall(self.proof)
                answer = struct.unpack("<I", receive(s, VERDICT_BYTES)[:4])[0]
                assert answer not in (WELCOME, WRONG_TOKEN), f"the token of TRAIN_GPT_TOKEN got the answer {answer}"

    def garbage(self, s, rng):
        s.sendall(rng.randbytes(rng.randrange(1, 4096)))

    def request(self, s, rng):
        s.sendall(rng.choice([b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00"]))

    def truncated(self, s, rng):
        s.sendall(hello(rng)[:rng.randrange(0, 64)])
        s.shutdown(socket.SHUT_WR)

    def wrong_token(self, s, rng, version=1):
        said = hello(rng, version=version)
        s.sendall(said)
        s.sendall(proof("not the token of the job", said, receive(s, REPLY_BYTES)))

    def wrong_version(self, s, rng):
        self.wrong_token(s, rng, version=rng.choice([0, 2, 2**32 - 1]))

    def replayed(self, s, rng):
        s.sendall(self.said + self.proof)

    def endless(self, s, rng):
        s.sendall(hello(rng))
        for _ in range(64):
            s.sendall(rng.randbytes(65536))

    def slow(self, s, rng):
        for byte in hello(rng):
            s.sendall(bytes([byte]))
            time.sleep(max(0.002, self.patience / 32))

    def half_open(self, s, rng):
        s.sendall(hello(rng)[:rng.choice([0, 8, 64])])

    def enter(self, s, rng, purpose, numbers):
        with socket.create_connection(self.at, 5) as first:
            first.sendall(hello(rng))
            job = receive(first, REPLY_BYTES)[16:32]
            said = hello(rng, purpose=purpose, to=self.to, numbers=numbers, job=job)
            s.sendall(said)
            reply = receive(s, REPLY_BYTES)
            s.sendall(proof("", said, reply) + bytes(64))
            if rng.randrange(2):  # at once: whoever looks then may find nobody
                s.shutdown(socket.SHUT_WR)
            else:
                s.recv(1, socket.MSG_PEEK)

    def joins(self, s, rng):
        self.enter(s, rng, CONTROL, (rng.randrange(self.ranks), 0, 0))

    def sends_data(self, s, rng):
        self.enter(s, rng, DATA, (rng.randrange(2), rng.randrange(self.ranks), self.to))

    kinds = [garbage, request, truncated, wrong_token, wrong_version, replayed, endless, slow, half_open]

    def connect(self, seed):
        """Returns the kind of connection and how it ended."""
        rng = random.Random(seed)
        kind = rng.choice(self.kinds)
        begin, data = time.monotonic(), b""
        try:
            connection = socket.create_connection(self.at, 30)
        except OSError as error:
            return kind.__name__, f"not connected: {error}"
        try:
            with connection as s:
                kind(self, s, rng)
                s.settimeout(max(self.patience, 0.01))
                while part := s.recv(4096):
                    data += part
                ended = "closed"
        except TimeoutError:
            ended = "left open" if self.patience else "closed"
        except OSError:
            ended = "closed"
        if self.patience and time.monotonic() - begin > self.patience:
            ended = "left open"
        if len(data) in (VERDICT_BYTES, REPLY_BYTES + VERDICT_BYTES):
            answer = struct.unpack("<I", data[-VERDICT_BYTES:][:4])[0]
            if answer not in (WRONG_TOKEN, OTHER_USER):
                ended = "BELIEVED"
        return kind.__name__, ended


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=40)
    parser.add_argument("--patience", type=float, default=15)
    parser.add_argument("--other-user", type=int)
    parser.add_argument("--to", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    hostile = Hostile(arguments)
    seeds = [arguments.seed * 1000003 + i for i in range(arguments.count)]
    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        counts = collections.Counter(pool.map(hostile.connect, seeds))
    for (kind, ended), n in sorted(counts.items()):
        print(f"{kind:14} {ended:10} {n}")
    sys.exit(any(ended != "closed" for _, ended in counts))


if __name__ == "__main__":
    main()
