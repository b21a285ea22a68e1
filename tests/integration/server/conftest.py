"""A server process for the tests of this folder, and a client that knows HTTP only."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from hotbunk.cli.serve import TINY, ensure_tiny
from hotbunk.trainer_hooks.recipes.models import build_tiny

START_SECONDS = 180.0
KEY = "a-key-that-only-tests-know"


class Server:
    """``hotbunk serve`` as a process, and requests to it."""

    def __init__(self, *arguments: str, key: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotbunk", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.killed = False  # by a test
        self._errors: list[str] = []
        # What nobody reads fills its pipe, and then the server stands still.
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        self.said = self._first_line()
        self.url = re.search(r"http://\S+", self.said)[0]  # type: ignore[index]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=headers)

    def _first_line(self) -> str:
        watch = threading.Timer(START_SECONDS, self.process.kill)
        watch.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watch.cancel()
        if "serving" not in line:
            self.process.wait()
            raise AssertionError(f"it did not start: {self.errors()}")
        return line

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._errors.extend(lines)

    def errors(self) -> str:
        """What it wrote to its stderr, once it has ended."""
        self._reading.join(10)
        return "".join(self._errors)

    def post(self, path: str, content: Any = None, **query: Any) -> Any:
        return self.http.post(path, params=query, json=content)

    def ok(self, path: str, content: Any = None, **query: Any) -> Any:
        """The answer's content; it must be a 200."""
        answer = self.post(path, content, **query)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def is_paused(self) -> bool:
        return bool(self.get("/is_paused")["is_paused"])

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> Any:
        """A greedy completion."""
        return self.ok("/v1/completions", asked(prompt, max_tokens, **more))

    def stream(self, prompt: Any, max_tokens: int, **more: Any) -> Streaming:
        return Streaming(
            self.url, asked(prompt, max_tokens, stream=True, **more), self.http.headers
        )

    def settled(self) -> dict[str, Any]:
        """The replica's status once nothing runs in it."""
        return self.until(lambda s: not s["running"] and not s["held"])

    def until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 10) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            status = self.get("/status")
            if holds(status):
                return dict(status)
            assert time.monotonic() < end, f"still {status}"
            time.sleep(0.005)

    def end(self, seconds: float = 20.0) -> int:
        """SIGTERM, and how it exits."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        code, said = self.process.returncode, self.errors()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0 or self.killed, f"it ended with {code}: {said}"
        assert "never retrieved" not in said, said


def asked(prompt: Any, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "any",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


class Streaming:
    """A streamed completion, read in a thread. ``first`` is set with its first chunk."""

    def __init__(self, url: str, body: dict[str, Any], headers: Any = ()) -> None:
        self.first = threading.Event()
        self.over = threading.Event()
        self.chunks: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.status = 0
        self.ended_well = False
        self._url, self._body, self._headers = url, body, dict(headers)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=60, headers=self._headers) as client,
                client.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if self._left.is_set():
                        return
                    if line == "data: [DONE]":
                        self.ended_well = True
                    elif line.startswith("data: "):
                        self.chunks.append(json.loads(line[6:]))
                        self.first.set()
        except httpx.HTTPError as error:
            self.error = error
        finally:
            self.over.set()
            self.first.set()

    def started(self) -> Streaming:
        assert self.first.wait(20), "no token came"
        assert self.chunks, f"{self.status} {self.error}"
        return self

    def leave(self) -> None:
        """Disconnect at the next chunk."""
        self._left.set()

    @property
    def pending(self) -> bool:
        return not self.over.is_set()

    def result(self, seconds: float = 30) -> Streaming:
        assert self.over.wait(seconds), "it is still pending"
        return self

    @property
    def last(self) -> dict[str, Any]:
        return dict(self.chunks[-1]["choices"][0])

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk["choices"][0]["token_ids"]]


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Server]]:
    """``serve("--dev", ...)``: a server process; all are ended with the session."""
    made: list[Server] = []

    def start(*arguments: str, key: str | None = None) -> Server:
        made.append(Server(*arguments, key=key))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where presets are made."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HOTBUNK_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def model(cache: Path) -> Path:
    """The model of the preset that is served."""
    return ensure_tiny(cache)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape."""
    return build_tiny(tmp_path_factory.mktemp("other"), **{**TINY, "seed": 1})


@pytest.fixture(scope="session")
def _shared(serve: Callable[..., Server], model: Path, other: Path) -> Server:
    return serve(
        *("--preset", "tiny", "--dev", "--allowed-root", str(other)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    )


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of the keyed server."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.touch(mode=0o600)
    file.write_text(f"{KEY}\nanother-key-of-some-length\n")
    return file


@pytest.fixture(scope="session")
def ranked(serve: Callable[..., Server], model: Path, other: Path, key_file: Path) -> Server:
    """A server of two data-parallel ranks that wants a key."""
    return serve(
        *("--model", str(model), "--data-parallel", "2", "--strict-model"),
        *("--allowed-root", str(other), "--api-key-file", str(key_file)),
        key=KEY,
    )


@pytest.fixture
def server(_shared: Server) -> Iterator[Server]:
    """The shared server: awake and open before and after each test."""

    def restore() -> None:
        status = _shared.get("/status")
        if status["is_paused"] or not status["servable"]:
            _shared.ok("/wake_up")
            _shared.ok("/resume")
        if _shared.get("/weight_info")["session"] == "started":
            _shared.ok("/abort_weight_update")
        if status["running"] or status["held"]:
            _shared.settled()
        if not _shared.get("/health")["servable"]:
            _shared.ok("/update_weights_from_disk")

    restore()
    yield _shared
    restore()
