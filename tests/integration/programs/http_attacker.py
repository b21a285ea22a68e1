"""Clients that no server deserves: half requests, lies about length, nobody who reads. Standard library only.

``python http_attacker.py URL SECONDS SEED``: four of them at once, for so long. What they are answered is
nobody's business here, but that it is no 500: those are printed, and the exit code is 1.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

AT_ONCE = 4
READ_SECONDS = 5.0
CONTROL = (
    "/pause?mode=keep",
    "/resume",
    "/sleep",
    "/wake_up",
    "/update_weights",
    "/abort_requests",
)
PATHS = (*CONTROL, "/v1/completions", "/v1/chat/completions", "/v1/generate", "/weight_checker")


class Attacker(threading.Thread):
    """One of them."""

    def __init__(self, url: str, until: float, seed: str) -> None:
        super().__init__(daemon=True)
        split = urlsplit(url)
        self._address = (split.hostname or "", split.port or 80)
        self._until = until
        self._random = random.Random(seed)
        self.made: dict[str, int] = {}
        self.faults: list[str] = []

    def run(self) -> None:
        kinds: list[Callable[[socket.socket], object]] = [
            self.half_a_head,
            self.half_a_body,
            self.a_body_that_is_longer_than_said,
            self.a_body_that_is_larger_than_allowed,
            self.chunks_that_are_none,
            self.no_http_at_all,
            self.depth,
            self.noise_as_json,
            self.a_stream_nobody_reads,
            self.leaving_in_the_middle,
            self.many_in_one,
            self.another_method,
            self.headers_without_end,
        ]
        while time.monotonic() < self._until:
            kind = self._random.choice(kinds)
            self.made[kind.__name__] = self.made.get(kind.__name__, 0) + 1
            try:
                with socket.create_connection(self._address, timeout=READ_SECONDS) as sock:
                    if self._random.random() < 0.5:  # a reset instead of an end
                        linger = struct.pack("ii", 1, 0)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    kind(sock)
            except OSError:  # cut off, as it deserves
                pass

    # -- what they do -------------------------------------------------------------------------

    def half_a_head(self, sock: socket.socket) -> None:
        head = self._head(self._path(), 10)
        sock.sendall(head[: self._random.randrange(1, len(head))])
        time.sleep(self._random.random() / 10)

    def half_a_body(self, sock: socket.socket) -> None:
        body = self._completion(5)
        sock.sendall(self._head("/v1/completions", len(body)) + body[: len(body) // 2])
        time.sleep(self._random.random() / 10)

    def a_body_that_is_longer_than_said(self, sock: socket.socket) -> None:
        body = self._completion(3)
        sock.sendall(self._head("/v1/completions", len(body)) + body + b"x" * 100)
        self._read("longer", sock)

    def a_body_that_is_larger_than_allowed(self, sock: socket.socket) -> None:
        sock.sendall(self._head(self._path(), self._random.choice((17 << 20, 1 << 60, 10**30))))
        self._read("larger", sock)

    def chunks_that_are_none(self, sock: socket.socket) -> None:
        head = self._head(self._path(), None, "Transfer-Encoding: chunked\r\n")
        size = self._random.choice((b"zz", b"-1", b"ffffffffffffffffff", b"5"))
        sock.sendall(head + size + b"\r\nhe\r\n0\r\n\r\n")
        self._read("chunks", sock)

    def no_http_at_all(self, sock: socket.socket) -> None:
        sock.sendall(self._random.randbytes(self._random.randrange(1, 3000)) + b"\r\n\r\n")
        self._read("bytes", sock)

    def depth(self, sock: socket.socket) -> None:
        """Brackets within brackets, where anything may stand."""
        deep = b"[" * 50_000 + b"]" * 50_000
        path, body = self._random.choice(
            (
                ("/v1/generate", b'{"request_id":"d","prompt":[1],"metadata":{"a":%s}}' % deep),
                ("/v1/completions", b'{"prompt":"x","a":%s}' % deep),
                ("/v1/completions", deep),
                ("/init_weight_transfer_engine", b'{"init_info":{"a":%s}}' % deep),
                ("/weight_checker", b'{"expected":%s}' % deep),
            )
        )
        sock.sendall(self._head(path, len(body)) + body)
        self._read(f"depth at {path}", sock)

    def noise_as_json(self, sock: socket.socket) -> None:
        body = self._completion(3)
        at = self._random.randrange(len(body))
        body = body[:at] + self._random.randbytes(3) + body[at + 3 :]
        path = self._path()
        sock.sendall(self._head(path, len(body)) + body)
        self._read(f"noise at {path} {body!r}", sock)

    def a_stream_nobody_reads(self, sock: socket.socket) -> None:
        body = self._completion(self._random.choice((5, 900)), stream=True, logprobs=2)
        sock.sendall(self._head("/v1/completions", len(body)) + body)
        time.sleep(self._random.random() / 3)

    def leaving_in_the_middle(self, sock: socket.socket) -> None:
        body = self._completion(900, stream=True, n=self._random.choice((1, 3)))
        sock.sendall(self._head("/v1/completions", len(body)) + body)
        sock.recv(self._random.choice((1, 200)))

    def many_in_one(self, sock: socket.socket) -> None:
        body = self._completion(2)
        sock.sendall((self._head("/v1/completions", len(body), close=False) + body) * 5)
        self._read("many", sock)

    def another_method(self, sock: socket.socket) -> None:
        method = self._random.choice((b"PUT", b"TRACE", b"GET", b"HEAD", b"CONNECT", b"OPTIONS"))
        sock.sendall(self._head(self._path(), 0).replace(b"POST", method, 1))
        self._read("method", sock)

    def headers_without_end(self, sock: socket.socket) -> None:
        sock.sendall(b"POST /pause HTTP/1.1\r\nHost: x\r\n")
        for number in range(2000):
            sock.sendall(b"X-%d: %s\r\n" % (number, b"y" * 100))
        self._read("headers", sock)

    # -- inside -------------------------------------------------------------------------------

    def _path(self) -> str:
        return self._random.choice(PATHS)

    def _completion(self, tokens: int, **more: object) -> bytes:
        body = {"prompt": "Go on", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return json.dumps(body | more).encode()

    @staticmethod
    def _head(path: str, length: int | None, more: str = "", *, close: bool = True) -> bytes:
        said = "" if length is None else f"Content-Length: {length}\r\n"
        end = "Connection: close\r\n" if close else ""
        kind = "Content-Type: application/json\r\n"
        return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{said}{more}{end}\r\n".encode()

    def _read(self, what: str, sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while data := sock.recv(1 << 16):
            got = (got + data)[:2000]
        if got.startswith(b"HTTP/1.1 5") and not got.startswith(b"HTTP/1.1 503"):
            self.faults.append(f"{what[:300]}: {got[:500]!r}")


def main(url: str, seconds: float, seed: str) -> int:
    until = time.monotonic() + seconds
    attackers = [Attacker(url, until, f"{seed}/{number}") for number in range(AT_ONCE)]
    for one in attackers:
        one.start()
    for one in attackers:
        one.join(seconds + 60)
    made: dict[str, int] = {}
    for one in attackers:
        for name, count in one.made.items():
            made[name] = made.get(name, 0) + count
        for fault in one.faults:
            print("FAULT", fault)
    print(json.dumps(made))
    return 1 if any(one.faults for one in attackers) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
