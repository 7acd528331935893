"""A headless Chromium, spoken to by the DevTools protocol over a websocket (RFC 6455), with the standard library alone.

    with Browser("chromium") as page:
        page.open("http://127.0.0.1:8000/")
        page.evaluate("document.title")
        page.screenshot("page.png")
"""
import base64
import http.client
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import time


class WebSocket:
    """Text messages in both directions."""

    def __init__(self, port, path, seconds):
        self.socket = socket.create_connection(("127.0.0.1", port), seconds)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                            f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                            f"Sec-WebSocket-Version: 13\r\n\r\n".encode())
        self.received = b""
        while b"\r\n\r\n" not in self.received:
            self.more()
        head, self.received = self.received.split(b"\r\n\r\n", 1)
        if not head.startswith(b"HTTP/1.1 101"):
            raise RuntimeError(f"no websocket at {path}: {head[:100]!r}")

    def more(self):
        data = self.socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the browser closed the connection")
        self.received += data

    def take(self, size):
        while len(self.received) < size:
            self.more()
        data, self.received = self.received[:size], self.received[size:]
        return data

    def send(self, text):
        data, mask = text.encode(), secrets.token_bytes(4)
        size = len(data)
        length = bytes([128 | size]) if size < 126 else struct.pack(">BH", 254, size) if size < 65536 else \
            struct.pack(">BQ", 255, size)
        self.socket.sendall(b"\x81" + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def receive(self):
        whole = b""
        while True:
            first, second = self.take(2)
            size = second & 127
            if size > 125:
                size = struct.unpack(">H", self.take(2))[0] if size == 126 else struct.unpack(">Q", self.take(8))[0]
            data = self.take(size)
            if first & 15 in (0, 1):
                whole += data
                if first & 128:
                    return whole.decode()
            elif first & 15 == 8:
                raise RuntimeError("the browser closed the connection")


class Browser:
    """One page of a browser that this object starts and ends."""

    def __init__(self, program, width=1440, height=1000, seconds=60):
        self.program, self.size, self.seconds, self.last = program, (width, height), seconds, 0
        self.errors = []   # of the page's scripts

    def __enter__(self):
        self.directory = tempfile.mkdtemp()
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", "--remote-debugging-port=0",
                     f"--user-data-dir={self.directory}", f"--window-size={self.size[0]},{self.size[1]}", "about:blank"]
        self.process = subprocess.Popen([self.program, *arguments], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def connect(self):
        file, end = os.path.join(self.directory, "DevToolsActivePort"), time.monotonic() + self.seconds
        while not (os.path.exists(file) and os.path.getsize(file)):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.program} opened no port for its debugger")
            time.sleep(0.05)
        with open(file, encoding="utf-8") as lines:
            port = int(lines.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=self.seconds)
        connection.request("GET", "/json/list")
        page = next(each for each in json.load(connection.getresponse()) if each["type"] == "page")
        self.socket = WebSocket(port, page["webSocketDebuggerUrl"].split(str(port), 1)[1], self.seconds)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=self.size[0], height=self.size[1], deviceScaleFactor=1,
                  mobile=False)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def call(self, method, **parameters):
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"])
            elif message.get("id") == self.last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def open(self, address):
        self.call("Page.navigate", url=address)

    def evaluate(self, script):
        """The value of a script; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, what):
        end = time.monotonic() + self.seconds
        while not self.evaluate(script):
            if time.monotonic() > end:
                raise RuntimeError(f"the page did not come to {what} within {self.seconds} s")
            time.sleep(0.02)

    def key(self, name):
        """Presses and releases a key, on the element that has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode={
                "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[name])

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
