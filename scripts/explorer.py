#!/usr/bin/env python3
"""Serves a page on which a plan can be changed, slider by slider: memory, time, the schedule, the ring all-reduce.

    python3 scripts/explorer.py                  prints the address to open in a browser; Ctrl-C ends it
    python3 scripts/explorer.py --port 8080

Every number on the page comes from ./train_gpt --plan --json, which runs once for each change. Uses only the standard
library, needs no network and no GPU, and listens on this machine alone unless --host says otherwise.

    GET /, /*.js, /*.css    the page: the files of scripts/explorer/, and no others
    GET /options            the controls: for each its option, values, unit and meaning
    POST /plan              {"model": "llama3:8B", "tp": 2, ...}, any of the controls, to {"command", "plan"};
                            422 and {"command", "error"} if train_gpt refuses it
    POST /text              the same, to {"command", "text"}: the plan as text, with its advice

Anything else is refused with a status 4xx and {"error"}.
"""
import argparse
import dataclasses
import http.server
import ipaddress
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "scripts", "explorer")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
FILES = {"/": "index.html", **{f"/{name}": name for name in (
    "style.css", "colours.json", "ask.js", "charts.js", "plan.js", "schedules.js", "ring.js")}}
LARGEST_REQUEST = 4096   # bytes
SLOTS = threading.Semaphore(2)   # programs that run at a time


def fail(message):
    sys.exit(f"explorer.py: {message}")


@dataclasses.dataclass
class Option:
    """A control of the page, and the option that it sets."""
    option: str
    label: str
    values: list         # names; or numbers, of which any from the first to the last, or to `most`, may be asked for
    start: object        # where the control stands at first
    left_out: object = None   # the value without which the command says the same
    unit: str = ""
    meaning: str = ""
    most: object = None       # where the page of schedules asks for larger numbers than the slider has

    def fault(self, value):
        """What is wrong with a value; None: nothing."""
        if isinstance(self.values[0], str):
            return None if isinstance(value, str) and value in self.values else f"use one of {', '.join(self.values)}"
        least, most = self.values[0], self.most or self.values[-1]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return None if is_number and least <= value <= most else f"use a whole number from {least} to {most}"

    def words(self, value):
        if value == self.left_out:
            return []
        return [self.option] if value == "on" else [self.option, str(value)]


def powers(first, last):
    return [first * 2**k for k in range((last // first).bit_length())]


OPTIONS = {
    "model": Option("--model", "Model", [
        "gpt2:124M", "gpt2:350M", "gpt2:774M", "gpt2:1558M", "gpt3:125M", "gpt3:350M", "gpt3:760M", "gpt3:1.3B",
        "gpt3:2.7B", "gpt3:6.7B", "gpt3:13B", "llama2:7B", "llama2:13B", "llama2:70B", "llama3:1B", "llama3:3B",
        "llama3:8B", "llama3:70B", "llama3:405B", "qwen2.5:0.5B", "qwen2.5:1.5B", "qwen2.5:3B", "qwen2.5:7B",
        "qwen2.5:14B", "qwen2.5:32B", "qwen2.5:72B", "qwen3:0.6B", "qwen3:1.7B", "qwen3:4B", "qwen3:8B", "qwen3:14B",
        "qwen3:32B", "qwen3:30B-A3B", "qwen3:235B-A22B", "smollm2:135M", "smollm2:360M", "smollm2:1.7B",
        "mixtral:8x7B", "mixtral:8x22B", "olmoe:1B-7B"], "llama3:8B", meaning="family and size"),
    "machine": Option("--machine", "Machine", [
        "h100x8", "h200x8", "b200x8", "gb200x72", "a100x8", "a100-40x8", "l40sx8", "rtx4090x8", "rtx4080x8", "v100x8"],
        "h100x8", meaning="GPU, and how many share a server"),
    "dtype": Option("--dtype", "Number format", ["bf16", "fp32"], "bf16", "fp32",
                    meaning="of weights and activations; gradients and optimizer state are fp32"),
    "ranks": Option("--ranks", "Ranks", powers(1, 16384), 8, unit="GPUs", most=2**16),
    "tp": Option("--tp", "Tensor parallel", powers(1, 64), 1, 1, "ranks", "each has a part of every layer"),
    "tp_overlap": Option("--tp-overlap", "Tensor parallel, overlapped", ["off", "on"], "off", "off",
                         meaning="one piece of a product is exchanged while another is computed"),
    "cp": Option("--cp", "Context parallel", powers(1, 64), 1, 1, "ranks", "each has a part of every sequence"),
    "cp_attention": Option("--cp-attention", "Attention of context parallel", ["ring", "all-gather", "ulysses"], "ring",
                           "ring", meaning="how queries meet the keys of other ranks"),
    "pp": Option("--pp", "Pipeline", powers(1, 64), 1, 1, "stages", "each has some of the layers"),
    "schedule": Option("--schedule", "Schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"], "1f1b", "1f1b",
                       meaning="order of forwards and backwards"),
    "chunks": Option("--pp-chunks", "Chunks", [0, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16], 0, 0, "per stage",
                     "runs of layers of a stage, with interleaved; 0: as many as the schedule has by itself"),
    "ep": Option("--ep", "Expert parallel", powers(1, 128), 1, 1, "ranks", "each has some of the experts"),
    "zero_stage": Option("--zero-stage", "ZeRO stage", [0, 1, 2, 3], 3, 0,
                         meaning="what data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also weights"),
    "replicas": Option("--dp-replicate", "Replicas", powers(1, 1024), 1, 1, "copies",
                       "hybrid sharding: each is sharded over its part of the ranks"),
    "batch_size": Option("--batch-size", "Micro-batch", powers(1, 256), 1, 4, "sequences", "of a rank", most=2**13),
    "seq_len": Option("--seq-len", "Sequence", powers(128, 131072), 8192, 1024, "tokens"),
    "total_batch": Option("--total-batch-size", "Total batch", [0, *powers(4096, 2**25)], 524288, 0, "tokens",
                          "per step; 0: one micro-batch of all ranks", most=2**30),
    "recompute": Option("--recompute", "Recomputation", ["none", "activation", "norm", "block"], "none", "none",
                        meaning="what the backward computes again instead of keeping it"),
}
SUGGESTED = [
    {"name": "One card of 24 GB", "text": "GPT-2 774M on an RTX 4090",
     "choices": {"model": "gpt2:774M", "machine": "rtx4090x8", "ranks": 1, "zero_stage": 0, "seq_len": 1024,
                 "batch_size": 4, "total_batch": 65536, "recompute": "activation"}},
    {"name": "8 H100", "text": "Llama 3 8B in one server, ZeRO stage 3", "choices": {}},
    {"name": "16,384 H100", "text": "Llama 3 405B, with all axes but experts",
     "choices": {"model": "llama3:405B", "ranks": 16384, "tp": 8, "cp": 2, "pp": 8, "schedule": "interleaved",
                 "chunks": 8, "zero_stage": 1, "total_batch": 16777216}}]


class Refused(Exception):
    """An answer that is an error: its HTTP status, and text or object."""

    def __init__(self, status, answer):
        super().__init__(answer)
        self.status, self.answer = status, answer if isinstance(answer, dict) else {"error": answer}


def read_choices(body):
    try:
        choices = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON: send an object with the controls' names and values") from None
    if not isinstance(choices, dict):
        raise Refused(400, "the body is not an object: send one with the controls' names and values")
    for name, value in choices.items():
        if name not in OPTIONS:
            raise Refused(400, f"{name[:40]!r}: there is no such control; use some of {', '.join(OPTIONS)}")
        fault = OPTIONS[name].fault(value)
        if fault:
            raise Refused(400, f"{name} {json.dumps(value)[:40]}: {fault}")
    return choices


def words_of(choices):
    """The options of a plan. A control that is not named stands where it does at first."""
    words = ["--sample-every", "0"]
    for name, option in OPTIONS.items():
        words += option.words(choices.get(name, option.start))
    return words


def command_of(words):
    return shlex.join(["./train_gpt", "--plan", *words])


def run(program, seconds, words, json_too=()):
    """What train_gpt prints. No shell, and no words but those of OPTIONS."""
    with SLOTS:
        try:
            done = subprocess.run([program, "--plan", *json_too, *words], cwd=ROOT, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            text = (f"this plan takes more than {seconds} s: fewer micro-batches (--total-batch-size) or stages take "
                    "less; explorer.py --timeout waits longer")
            raise Refused(422, {"command": command_of(words), "error": text}) from None
        except OSError as error:
            raise Refused(503, f"cannot run {program}: {error.strerror}") from None
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace").strip()
        raise Refused(422, {"command": command_of(words), "error": text or f"train_gpt ended with {done.returncode}"})
    return done.stdout.decode("utf-8", "replace")


def is_address(name):
    """Is this what a Host header has for an address: 127.0.0.1, [::1]?"""
    try:
        if name.startswith("[") and name.endswith("]"):
            return bool(ipaddress.IPv6Address(name[1:-1]))
        return bool(ipaddress.IPv4Address(name))
    except ValueError:
        return False


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection. The server has `program`, `seconds` and `names`."""
    server_version, sys_version, default_request_version = "explorer", "", "HTTP/1.0"
    timeout = 15   # seconds that a client may be silent

    def do_GET(self):
        self.answer(self.page)

    def do_HEAD(self):
        self.answer(self.page)

    def do_POST(self):
        self.answer(self.plan)

    def do_other(self):
        self.answer(self.refuse_method)
    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_other

    def answer(self, make):
        """Sends what `make` returns, type and bytes, or why it refused."""
        try:
            self.require_own_host()
            status, (kind, body) = 200, make()
        except Refused as refused:
            status, kind, body = refused.status, "application/json", json.dumps(refused.answer).encode()
        self.close_connection = True
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))),
                            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                            ("Referrer-Policy", "no-referrer"), ("Connection", "close"),
                            ("Content-Security-Policy", "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
                                                        "form-action 'none'; frame-ancestors 'none'")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if status in (403, 404, 405, 411, 413, 415):
            self.drain()

    def drain(self):
        """Takes what is left of a refused request, for a while: closing at once would reset the connection, and the
        client might never read why."""
        end, left = time.monotonic() + 2, 1 << 23
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(0.5)
        try:
            while left > 0 and time.monotonic() < end and (data := self.rfile.read1(1 << 16)):
                left -= len(data)
        except OSError:
            pass

    def require_own_host(self):
        """Pages of other sites may send requests here, also under a name of their own that leads to this machine (DNS
        rebinding). So the Host must be an address, localhost or a name of this server, and a page that asks must be
        ours. Its port may be another one: that of a tunnel (ssh -L), or none."""
        hosts = self.headers.get_all("Host", []) if self.headers else []   # Python 3.14: a dict in HTTP/0.9
        name = re.sub(r":[0-9]+$", "", hosts[0]) if len(hosts) == 1 else ""
        if not (name in self.server.names or is_address(name)):
            raise Refused(403, f"Host {', '.join(hosts)[:80] or '(none)'!r} is no name of this server: open the "
                               "address that explorer.py printed, or give it that name as --host")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise Refused(403, f"a page of {origin[:80]!r} asks: only this server's own page may")

    def page(self):
        path = self.path.split("?")[0]
        if path == "/options":
            controls = {name: dataclasses.asdict(option) for name, option in OPTIONS.items()}
            return "application/json", json.dumps({"controls": controls, "suggested": SUGGESTED}).encode()
        if path in ("/plan", "/text"):
            raise Refused(405, f"{path} takes POST, with the controls as JSON")
        if path not in FILES:
            raise Refused(404, f"{path[:80]!r}: there is no such page; start at /")
        with open(os.path.join(PAGE, FILES[path]), "rb") as file:
            return TYPES[os.path.splitext(FILES[path])[1]], file.read()

    def plan(self):
        if self.path not in ("/plan", "/text"):
            raise Refused(404 if self.path not in FILES else 405, f"POST {self.path[:80]!r}: use /plan or /text")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "send Content-Type: application/json")
        words = words_of(read_choices(self.body()))
        if self.path == "/text":
            text = run(self.server.program, self.server.seconds, words)
            return "application/json", json.dumps({"command": command_of(words), "text": text}).encode()
        plan = json.loads(run(self.server.program, self.server.seconds, words, ["--json"]))
        return "application/json", json.dumps({"command": command_of(words), "plan": plan}).encode()

    def body(self):
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise Refused(411, "send one Content-Length, and no Transfer-Encoding")
        if not (lengths[0].isascii() and lengths[0].isdigit()):
            raise Refused(400, f"Content-Length {lengths[0][:20]!r}: not a number")
        if len(lengths[0]) > 9 or int(lengths[0]) > LARGEST_REQUEST:
            raise Refused(413, f"a request has at most {LARGEST_REQUEST} bytes")
        body = self.rfile.read(int(lengths[0]))
        if len(body) != int(lengths[0]):
            raise Refused(400, "the body ended early")
        return body

    def refuse_method(self):
        raise Refused(405, f"{self.command}: use GET or POST")

    def log_message(self, *_):
        """Silent: one line for each change of a slider would hide the address."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that went away, because a slider moved on, is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free [8000]")
    parser.add_argument("--host", default="127.0.0.1",
                        help="address to listen on; 0.0.0.0 lets other machines in, without a password [127.0.0.1]")
    parser.add_argument("--program", default=os.path.join(ROOT, "train_gpt"), help="[train_gpt]")
    parser.add_argument("--timeout", type=int, default=30, help="seconds that a plan may take [30]")
    options = parser.parse_args()
    if not os.access(options.program, os.X_OK):
        fail(f"{options.program} is missing: build it with make, or name another with --program")
    if not options.host:   # would be 0.0.0.0
        fail("--host is empty: expected an address")
    if not 0 <= options.port <= 65535 or options.timeout < 1:
        fail(f"--port {options.port} --timeout {options.timeout}: expected a port up to 65535 and at least a second")
    try:
        server = Server((options.host, options.port), Handler)
    except OSError as error:
        fail(f"cannot listen on {options.host}, port {options.port}: {error.strerror}; choose another --host or "
             "--port")
    server.program, server.seconds = os.path.abspath(options.program), options.timeout
    shown, own = options.host, []
    if options.host == "0.0.0.0":
        shown, own = "127.0.0.1", [socket.gethostname()]
    server.names = {name.lower() for name in ("localhost", shown, *own)} - {""}   # as browsers write them
    print(f"explorer: http://{shown}:{server.server_port}/    (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
