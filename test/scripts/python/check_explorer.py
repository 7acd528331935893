#!/usr/bin/env python3
"""Asks scripts/explorer.py what its page asks, and what it must refuse: explorer_test.sh runs this.

    python3 test/scripts/python/check_explorer.py DIRECTORY      DIRECTORY: an empty one, for this test
"""
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time


def command(path):
    return [sys.executable, "scripts/explorer.py", *path]


class Explorer:
    """A server that this object starts and ends."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(command(["--port", "0", *arguments]), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.address = re.fullmatch(r"explorer: (http://127\.0\.0\.1:(\d+)/) +\(Ctrl-C ends it\)\n",
                                    self.process.stdout.readline())
        self.url, self.port = self.address[1], int(self.address[2])
        self.host = f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        assert (self.process.returncode, out, err) == (130, "", ""), (self.process.returncode, out, err)

    def raw(self, request):
        """(status, headers, body) of the answer to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), 60) as connection:
            answer = b""
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                while data := connection.recv(1 << 16):
                    answer += data
            except OSError:   # after an answer that did not wait for all of the request
                pass
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body

    def ask(self, method, path, body=b"", **headers):
        """`headers`: those that differ from what the page sends; None: without"""
        all_headers = {"Host": self.host}
        if method == "POST":
            all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in all_headers.items() if value is not None]
        return self.raw("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def post(self, path, choices):
        status, _, body = self.ask("POST", path, json.dumps(choices).encode())
        return status, json.loads(body)


def trainer(words):
    return subprocess.run(["./train_gpt", *words], capture_output=True, text=True, timeout=120, check=False)


def check_page(server):
    """All that the page refers to is there, of the right type, and nothing is from elsewhere."""
    status, headers, html = server.ask("GET", "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    names = re.findall(r'(?:src|href)="([^"]*)"', html.decode())
    assert len(names) >= 6, names
    pages = [html.decode()]
    for name in names + ["colours.json"]:
        if name == "data:,":
            continue
        status, headers, body = server.ask("GET", "/" + name)
        kind = {"js": "text/javascript", "css": "text/css", "json": "application/json"}[name.split(".")[-1]]
        assert status == 200 and headers["Content-Type"] == f"{kind}; charset=utf-8", name
        with open(f"scripts/explorer/{name}", "rb") as file:
            assert file.read() == body, name
        pages.append(body.decode())
    assert {name for name in os.listdir("scripts/explorer")} == {*names, "colours.json", "index.html"} - {"data:,"}
    elsewhere = set(re.findall(r"https?://[^\"'`) ]+|(?<!:)//[a-z]+\.[a-z]+", "\n".join(pages)))
    assert elsewhere <= {"http://www.w3.org/2000/svg"}, elsewhere
    status, headers, body = server.ask("HEAD", "/")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(html)))


def check_lists(controls):
    """Models, and machines with GPUs, are those of the program; the options are its options."""
    with open("llmc/model/presets.h", encoding="utf-8") as file:
        models = re.findall(r'^ {4}\{"([a-z0-9.]+:[^"]+)",', file.read(), re.M)
    assert controls["model"]["values"] == models, set(controls["model"]["values"]) ^ set(models)
    with open("llmc/run/plan/machines.h", encoding="utf-8") as file:
        machines = re.findall(r'^"([a-z0-9-]+x\d+)": \{$', file.read(), re.M)
    assert sorted(controls["machine"]["values"]) == sorted(m for m in machines if not m.startswith("cpu")), machines
    options = trainer(["--help"]).stdout
    for name, control in controls.items():
        assert f"{control['option']} " in options and control["label"], name


# For each control: choices in which it can move, and where the plan shows it. Some values are on no slider.
SHOWN = {
    "model": ({"model": "qwen3:0.6B"}, lambda p: p["model"]["name"]),
    "machine": ({"machine": "gb200x72"}, lambda p: p["device"].split()[0]),
    "dtype": ({"dtype": "fp32"}, lambda p: p["precision"]["weights"]),
    "ranks": ({"ranks": 24}, lambda p: p["layout"]["ranks"]),
    "tp": ({"tp": 4}, lambda p: p["layout"]["tp"]),
    "tp_overlap": ({"tp_overlap": "on", "tp": 2}, lambda p: "on"),
    "cp": ({"cp": 2}, lambda p: p["layout"]["cp"]),
    "cp_attention": ({"cp_attention": "ulysses", "cp": 2}, lambda p: p["layout"]["cp_attention"]),
    "pp": ({"pp": 4}, lambda p: p["layout"]["pp"]),
    "schedule": ({"schedule": "zb-h1", "pp": 2}, lambda p: p["layout"]["schedule"]),
    "chunks": ({"chunks": 4, "schedule": "interleaved", "pp": 2}, lambda p: p["layout"]["chunks_per_stage"]),
    "ep": ({"ep": 8, "model": "mixtral:8x7B", "seq_len": 4096}, lambda p: p["layout"]["ep"]),
    "zero_stage": ({"zero_stage": 2}, lambda p: p["layout"]["zero_stage"]),
    "replicas": ({"replicas": 4}, lambda p: p["layout"]["dp_replicate"]),
    "batch_size": ({"batch_size": 2}, lambda p: p["batch"]["batch_size"]),
    "seq_len": ({"seq_len": 1536, "total_batch": 0}, lambda p: p["batch"]["seq_len"]),
    "total_batch": ({"total_batch": 1048576}, lambda p: p["batch"]["tokens_per_step"]),
    "recompute": ({"recompute": "block"}, lambda p: p["precision"]["recompute"])}


def check_plans(server, options):
    """Answers are the program's, in every number, and each control reaches its option."""
    assert set(SHOWN) == set(options["controls"])
    starts = [({}, None)] + [(each["choices"], None) for each in options["suggested"]]
    assert len(starts) == 4
    plans = []
    for choices, shown in starts + list(SHOWN.values()):
        if "ranks" in choices and choices["ranks"] == 24:
            choices = {**choices, "total_batch": 24 * 8192}
        status, answer = server.post("/plan", choices)
        assert status == 200, (choices, answer)
        words = shlex.split(answer["command"])
        assert words[:2] == ["./train_gpt", "--plan"] and "--json" not in words
        direct = trainer(["--json", *words[1:]])
        assert direct.returncode == 0 and json.loads(direct.stdout) == answer["plan"], choices
        assert answer["plan"]["step_seconds"] > 0
        name = next(iter(choices), None)
        if shown:
            assert shown(answer["plan"]) == choices[name], (choices, shown(answer["plan"]))
        plans.append((choices, answer["plan"]))
    # --tp-overlap is in no field, but in the time that is exposed.
    overlapped = next(plan["time"] for choices, plan in plans if "tp_overlap" in choices)
    status, without = server.post("/plan", {"tp": 2})
    assert status == 200
    alone = without["plan"]["time"]["exposed_communication_seconds"]
    assert overlapped["exposed_communication_seconds"] < alone, (overlapped, alone)

    # What the command leaves out is what the program does without it.
    for name, control in options["controls"].items():
        if control["left_out"] in (None, 0, "off") and name != "zero_stage":   # 0: as the schedule or the ranks have it
            continue
        choices, field = SHOWN[name]
        status, answer = server.post("/plan", {**choices, "total_batch": 0, name: control["left_out"]})
        assert status == 200 and control["option"] not in shlex.split(answer["command"]), (name, answer)
        assert field(answer["plan"]) == control["left_out"], name

    # The page of schedules, with its sliders and those of the plan as far right as they go: the program answers.
    most = {"model": "gpt2:124M", "batch_size": 256 * 32, "total_batch": 256 * 32 * 131072, "seq_len": 131072,
            "ranks": 16 * 64 * 64, "pp": 16, "tp": 64, "cp": 64}
    status, answer = server.post("/plan", most)
    assert status == 200 or (status == 422 and answer["error"].startswith("train_gpt: ")), answer

    status, answer = server.post("/text", {"pp": 2})
    assert status == 200 and answer["text"] == trainer(shlex.split(answer["command"])[1:]).stdout
    assert "\n=> " in answer["text"]
    for path in ("/plan", "/text"):   # the program's own words
        for choices in ({"tp": 3}, {"ep": 2}, {"seq_len": 131072, "total_batch": 4096}, {"schedule": "zb-v"},
                        {"ranks": 1, "tp": 2}):
            status, answer = server.post(path, choices)
            refused = trainer(shlex.split(answer["command"])[1:])
            assert status == 422 and refused.returncode == 1 and answer["error"] == refused.stderr.strip(), answer


def hostile(server):
    """(what, expected status, answer) of requests that must not reach the program."""
    def bodies():
        for body in (b"", b"{", b"[]", b"7", b"null", b'"tp"', b"\xff\xfe", b"[" * 4000, b'{"tp": 2}}', b"{'tp': 2}",
                     b'{"tp": NaN}', b'{"tp": 1e3}', b'{"tp": 2.0}', b'{"tp": true}', b'{"tp": "2"}', b'{"tp": null}',
                     b'{"tp": [2]}', b'{"tp": -1}', b'{"tp": 0}', b'{"tp": 128}', b'{"tp": ' + b"9" * 4000 + b"}",
                     b'{"ranks": 99999999999999999999}', b'{"zero_stage": 4}', b'{"dtype": "fp8"}', b'{"model": 7}',
                     b'{"model": "/etc/passwd"}', b'{"model": "../../etc"}', b'{"model": "--help"}',
                     b'{"model": "llama3:8B --out-dir x"}', b'{"model": "llama3:8B;touch x"}', b'{"model": "$(id)"}',
                     b'{"machine": "x.json"}', b'{"machine": "h100x8\\u0000"}', b'{"schedule": "pipedream"}',
                     b'{"option": "--out-dir"}', b'{"--tp": 2}', b'{"": 2}', b'{"__proto__": 2}', b'{"out_dir": "x"}',
                     b'{"tp": 2, "trace": "x"}'):
            yield body, 400, server.ask("POST", "/plan", body)
    yield from bodies()
    body = b'{"tp": 2}'
    for path in ("/../scripts/explorer.py", "/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd",
                 "/explorer.py", "/explorer/index.html", "/index.html", "/%2e%2e/LICENSE", "/style.css/../../explorer.py",
                 "/style.css%00",
                 "/\\..\\LICENSE", "/options/", "http://evil.example/", "*", "/plan.js\x7f", "/" + "x" * 3000):
        yield path[:40], 404, server.ask("GET", path)
        yield path[:40], 404, server.ask("POST", path, body)
    yield "too long", 414, server.ask("GET", "/" + "x" * 70000)
    for host in (None, "", "evil.example", f"evil.example:{server.port}", f"@{server.host}",
                 f"{server.host}, evil.example", f"127.0.0.1.evil.example:{server.port}", f"localhost.:{server.port}",
                 f"[::1:{server.port}", f"0x7f000001:{server.port}", f"a@127.0.0.1:{server.port}"):
        for method, path in (("POST", "/plan"), ("GET", "/"), ("GET", "/options")):
            yield host, 403, server.ask(method, path, body, Host=host)
    yield "two hosts", 403, server.raw(f"GET / HTTP/1.1\r\nHost: {server.host}\r\nHost: evil.example\r\n\r\n".encode())
    yield "no host", 403, server.raw(b"GET / HTTP/1.0\r\n\r\n")
    yield "no version", 403, server.raw(b"GET /\r\n\r\n")
    for origin in ("http://evil.example", "null", "", f"https://{server.host}", f"http://{server.host}.evil.example",
                   f"http://localhost:{server.port}"):
        yield origin, 403, server.ask("POST", "/plan", body, Origin=origin)
        yield origin, 403, server.ask("POST", "/text", body, Origin=origin)
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        yield kind, 415, server.ask("POST", "/plan", body, Content_Type=kind)
    yield "large", 413, server.ask("POST", "/plan", b" " * 5000)
    yield "large", 413, server.ask("POST", "/plan", b"x" * 3_000_000)
    yield "said to be large", 413, server.ask("POST", "/plan", body, Content_Length="99999999999999999999")
    for length in ("-1", "+9", "9x", "0x9", "²", "", "9, 9"):
        yield length, 400, server.ask("POST", "/plan", body, Content_Length=length)
    yield "short", 400, server.ask("POST", "/plan", body, Content_Length="12")
    yield "no length", 411, server.ask("POST", "/plan", body, Content_Length=None)
    yield "chunked", 411, server.ask("POST", "/plan", body, Transfer_Encoding="chunked")
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        yield method, 405, server.ask(method, "/plan", body)
    yield "GET", 405, server.ask("GET", "/plan")
    yield "POST", 405, server.ask("POST", "/", body)
    yield "garbage", 400, server.raw(b"\x00\x01\x02\r\n\r\n")
    yield "headers", 431, server.ask("GET", "/", **{f"X-{k}": "1" for k in range(200)})


def check_hostile(directory):
    log, program = os.path.join(directory, "log"), os.path.join(directory, "program")
    with open(program, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\necho "$@" >>{shlex.quote(log)}\nexec ./train_gpt "$@"\n')
    os.chmod(program, 0o755)
    with Explorer("--program", program) as server:
        number = 0
        for what, expected, (status, headers, body) in hostile(server):
            assert status == expected, (what, expected, status, body[:200])
            if headers.get("Content-Type", "").startswith("application/json"):
                assert 10 < len(json.loads(body)["error"]) < 600, body   # says what is wrong, and is not an echo
            number += 1
        assert not os.path.exists(log), "the program ran"
        # A client that says nothing holds up nobody; one under the name localhost is at home.
        with socket.create_connection(("127.0.0.1", server.port)):
            name = f"localhost:{server.port}"
            status, _, body = server.ask("POST", "/plan", b'{"tp": 2}', Host=name, Origin=f"http://{name}")
        assert status == 200 and json.loads(body)["plan"]["layout"]["tp"] == 2
        with open(log, encoding="utf-8") as file:
            assert file.read() == ("--plan --json --sample-every 0 --model llama3:8B --machine h100x8 --dtype bf16 "
                                   "--ranks 8 --tp 2 --zero-stage 3 --batch-size 1 --seq-len 8192 --total-batch-size 524288\n")
    return number


def check_names():
    """The Host that browsers send on port 80, through a tunnel, and by name to a server that others may reach."""
    def page(server, host, **headers):
        return server.ask("GET", "/", Host=host, **headers)[0]
    with Explorer() as server:
        for host in ("127.0.0.1", "localhost", "localhost:9000", "[::1]", "[::1]:9000"):
            assert page(server, host) == page(server, host, Origin=f"http://{host}") == 200, host
            assert page(server, host, Origin="http://localhost:9001") == 403, host
    with Explorer("--host", "0.0.0.0") as server:
        for name in (socket.gethostname(), socket.getfqdn()):
            assert page(server, f"{name.lower()}:{server.port}") == 200, name
        assert page(server, f"evil.example:{server.port}") == 403


def check_slow_program(directory):
    """A plan that takes too long is refused, and its program ended."""
    program, pid = os.path.join(directory, "slow"), os.path.join(directory, "pid")
    with open(program, "w", encoding="utf-8") as file:
        file.write(f"#!/bin/sh\necho $$ >{shlex.quote(pid)}\nexec sleep 600\n")
    os.chmod(program, 0o755)
    with Explorer("--program", program, "--timeout", "3") as server:
        begin = time.monotonic()
        status, answer = server.post("/plan", {})
        assert status == 422 and "takes more than 3 s" in answer["error"], answer
        assert time.monotonic() - begin < 30
        with open(pid, encoding="utf-8") as file:
            assert not os.path.exists(f"/proc/{int(file.read())}")
        os.remove(program)
        status, answer = server.post("/plan", {})
        assert status == 503 and "cannot run" in answer["error"], answer


def check_start(directory):
    def refused(*arguments):
        done = subprocess.run(command(arguments), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (1, ""), done
        return done.stderr
    assert "is missing: build it with make" in refused("--program", os.path.join(directory, "nothing"))
    assert "expected a port up to 65535" in refused("--port", "70000")
    assert "--host is empty" in refused("--host", "", "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in refused("--port", str(port))


def main():
    directory = sys.argv[1]
    with Explorer() as server:
        check_page(server)
        status, _, body = server.ask("GET", "/options")
        assert status == 200
        options = json.loads(body)
        check_lists(options["controls"])
        check_plans(server, options)
    number = check_hostile(directory)
    check_names()
    check_slow_program(directory)
    check_start(directory)
    print(f"{len(SHOWN)} controls, {number} hostile requests")


if __name__ == "__main__":
    main()
