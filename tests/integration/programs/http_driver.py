"""Drives a rollout server by nothing but its HTTP plane, and says what holds. Standard library only.

``python http_driver.py http://127.0.0.1:8000``: a table, and exit code 0 only if all of it holds. Ours
needs ``--dev --enable-prefix-caching --enable-prompt-tokens-details``, with any ``--backend``; stock vLLM
``VLLM_SERVER_DEV_MODE=1`` and ``--enable-sleep-mode --enable-prompt-tokens-details``. The model needs a
context of 1024 tokens, or ``--long N`` less than that. ``--without GROUP`` leaves a group out, for an
engine that says it has no such thing, and the table says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode, urlsplit

PROMPT = "A prompt that is a good deal longer than one block of the cache. " * 2
MOMENT = 0.2  # seconds in which a server that may go on has gone on
TIMEOUT = 60.0
LONG = 600
GROUPS = ("state", "input", "lifecycle", "caches", "sleep")
FAULTS = (AssertionError, KeyError, TypeError, ValueError, OSError, http.client.HTTPException)


class Plane:
    """The endpoints. ``long``: tokens of a response that is still under way when it is paused."""

    def __init__(self, url: str, key: str = "", model: str = "", long: int = LONG) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.long = long
        # Stock vLLM knows its model by one name only.
        self.model = model or str(self.call("GET", "/v1/models")[1]["data"][0]["id"])

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, Any]:
        """Status, and the content as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
        try:
            self.ask(connection, method, path, body, **query)
            answer = connection.getresponse()
            said = answer.read()
            if not answer.headers.get("Content-Type", "").startswith("application/json"):
                return answer.status, said.decode(errors="replace") or None
            return answer.status, json.loads(said)
        finally:
            connection.close()

    def ask(self, connection: Any, method: str, path: str, body: Any = None, **query: Any) -> None:
        """Send the request."""
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        sent = None if body is None else json.dumps(body)
        connection.request(method, target, body=sent, headers=headers)

    def post(self, path: str, body: Any = None, **query: Any) -> tuple[int, Any]:
        return self.call("POST", path, body, **query)

    def ok(self, path: str, body: Any = None, **query: Any) -> bool:
        return self.post(path, body, **query)[0] == 200

    def flag(self, name: str) -> bool:
        status, said = self.call("GET", f"/{name}")
        assert status == 200, f"/{name} answers {status}"
        assert isinstance(said[name], bool), said
        return bool(said[name])

    def complete(self, **more: Any) -> tuple[int, Any]:
        body = {
            "model": self.model,
            "prompt": PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": 1,
        }
        return self.post("/v1/completions", {**body, "ignore_eos": True, **more})

    def stream(self, max_tokens: int) -> Stream:
        return Stream(self, max_tokens)


class Stream(threading.Thread):
    """A streamed completion. ``first`` is set by its first chunk."""

    def __init__(self, plane: Plane, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.first, self.chunks, self.reason = threading.Event(), 0, ""
        self._plane, self._max = plane, max_tokens
        self.start()

    def run(self) -> None:
        plane = self._plane
        connection = http.client.HTTPConnection(plane.host, plane.port, timeout=TIMEOUT)
        body = {"model": plane.model, "prompt": "Go", "max_tokens": self._max, "temperature": 0}
        plane.ask(
            connection, "POST", "/v1/completions", {**body, "ignore_eos": True, "stream": True}
        )
        try:
            for line in connection.getresponse():
                if line.startswith(b"data: {") and b'"choices"' in line:
                    choice = json.loads(line[6:])["choices"][0]
                    self.chunks += 1
                    self.reason = choice["finish_reason"] or self.reason
                    self.first.set()
        except FAULTS as error:
            self.reason = f"{type(error).__name__}: {error}"
        connection.close()

    def begun(self) -> Stream:
        assert self.first.wait(TIMEOUT), "no first token"
        return self

    def end(self) -> str:
        self.join(TIMEOUT)
        return "pending" if self.is_alive() else self.reason


class Table:
    """What was found."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, bool, str]] = []

    def check(self, name: str, holds: Callable[[], object]) -> None:
        """Note whether it holds; an error is a no."""
        try:
            held, why = bool(holds()), ""
        except FAULTS as error:
            held, why = False, f"{type(error).__name__}: {error}"
        self.rows.append((name, held, why))

    def show(self) -> int:
        for name, held, why in self.rows:
            print(f"{'holds' if held else 'BROKEN':<7} {name}{'  ' + why if why else ''}")
        broken = sum(not held for _, held, _ in self.rows)
        print(f"{len(self.rows)} checks, {broken} broken")
        return 1 if broken else 0


def state(plane: Plane, table: Table) -> None:
    table.check("not paused at first", lambda: not plane.flag("is_paused"))
    table.check(
        "resume when open changes nothing",
        lambda: plane.ok("/resume") and plane.ok("/resume") and not plane.flag("is_paused"),
    )
    for mode in ("abort", "wait", "keep"):
        table.check(
            f"pause {mode}, twice, then resume, twice",
            lambda mode=mode: (
                plane.ok("/pause", mode=mode)
                and plane.ok("/pause", mode=mode)
                and plane.flag("is_paused")
                and plane.ok("/resume")
                and plane.ok("/resume")
                and not plane.flag("is_paused")
            ),
        )


def _refused(plane: Plane, path: str, name: str, **query: Any) -> bool:
    status, said = plane.post(path, **query)
    return status == 422 and said["detail"][0]["loc"][:2] == ["query", name]


def bad_input(plane: Plane, table: Table) -> None:
    table.check(
        "a bad mode is 422 at query.mode, and it stays open",
        lambda: _refused(plane, "/pause", "mode", mode="invalid") and not plane.flag("is_paused"),
    )
    plane.ok("/pause", mode="keep")
    table.check(
        "a bad mode is 422 at query.mode, and it stays paused",
        lambda: _refused(plane, "/pause", "mode", mode="invalid") and plane.flag("is_paused"),
    )
    plane.ok("/resume")
    table.check("an empty prompt is 400", lambda: plane.complete(prompt="")[0] == 400)
    bad = (400, 422)  # OpenAI says 400
    table.check("no JSON at all is 4xx", lambda: plane.post("/v1/completions")[0] in bad)
    table.check("a negative limit is 4xx", lambda: plane.complete(max_tokens=-1)[0] in bad)


def lifecycle(plane: Plane, table: Table, mode: str) -> None:
    running = plane.stream(plane.long // 6 if mode == "wait" else plane.long).begun()
    table.check(f"{mode}: the pause is 200", lambda: plane.ok("/pause", mode=mode))
    if mode == "keep":
        time.sleep(MOMENT)
        frozen = running.chunks
        table.check("keep: the running request is pending", running.is_alive)
    else:
        wanted = {"abort": "abort", "wait": "length"}[mode]
        table.check(f"{mode}: the running request ended: {wanted}", lambda: running.end() == wanted)
    late = plane.stream(5)
    time.sleep(MOMENT)
    table.check(f"{mode}: a late request is pending", lambda: late.is_alive() and not late.chunks)
    if mode == "keep":
        table.check("keep: the running request stood still", lambda: running.chunks == frozen)
    table.check(f"{mode}: the resume is 200", lambda: plane.ok("/resume"))
    table.check(f"{mode}: the late request ends well", lambda: late.end() == "length")
    if mode == "keep":
        table.check("keep: the frozen request ends well", lambda: running.end() == "length")


def golden(answer: tuple[int, Any]) -> tuple[Any, ...]:
    status, said = answer
    assert status == 200, said
    choice, usage = said["choices"][0], said["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"], counts)


def cached(answer: tuple[int, Any]) -> int:
    return int(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def caches(plane: Plane, table: Table) -> None:
    def cycle(clear: str) -> tuple[int, Any]:
        plane.ok("/pause", mode="abort", clear_cache=clear)
        plane.ok("/resume")
        return plane.complete()

    r0, r1 = cycle("true"), plane.complete()
    r2, r3 = cycle("false"), cycle("true")
    table.check("R0: nothing was cached", lambda: cached(r0) == 0)
    table.check("R1 = R0, from the cache", lambda: golden(r1) == golden(r0) and cached(r1) > 0)
    table.check(
        "R2 = R0, clear_cache=false kept it", lambda: golden(r2) == golden(r0) and cached(r2) > 0
    )
    table.check(
        "R3 = R0, clear_cache=true cleared it", lambda: golden(r3) == golden(r0) and cached(r3) == 0
    )


def sleeping(plane: Plane, table: Table) -> None:
    table.check(
        "a bad level is 422 at query.level, and nothing sleeps",
        lambda: _refused(plane, "/sleep", "level", level=5) and not plane.flag("is_sleeping"),
    )
    table.check(
        "a bad level in the body is 422, and nothing sleeps",
        lambda: plane.post("/sleep", {"level": "5"})[0] == 422 and not plane.flag("is_sleeping"),
    )
    plane.ok("/sleep", level=1)
    table.check(
        "a bad tag is 422 at query.tags, and it sleeps on",
        lambda: _refused(plane, "/wake_up", "tags", tags="bogus") and plane.flag("is_sleeping"),
    )
    plane.ok("/wake_up")
    before = golden(plane.complete())
    table.check("level 1 as a string in the body", lambda: plane.ok("/sleep", {"level": "1"}))
    table.check("it sleeps", lambda: plane.flag("is_sleeping"))
    table.check("it wakes", lambda: plane.ok("/wake_up") and not plane.flag("is_sleeping"))
    table.check("after level 1 it serves as before", lambda: golden(plane.complete()) == before)
    # In the query, too: stock vLLM does not read the body, and would keep the weights.
    table.check("level 2, said twice", lambda: plane.ok("/sleep", {"level": "2"}, level=2))
    table.check(
        "it wakes, whole and by tag",
        lambda: (
            plane.ok("/wake_up")
            and plane.ok("/wake_up", tags="weights")
            and not plane.flag("is_sleeping")
        ),
    )

    def discarded() -> bool:
        status, said = plane.complete()
        return status == 503 and bool(said["error"]["message"])

    table.check("after level 2 no token comes: 503 with the reason", discarded)
    table.check("weights come from disk", lambda: plane.ok("/update_weights_from_disk", {}))
    table.check("then it serves as before", lambda: golden(plane.complete()) == before)
    plane.ok("/pause", mode="keep")
    plane.ok("/sleep", level=1)
    plane.ok("/wake_up")
    table.check("a pause of ours survives the wake", lambda: plane.flag("is_paused"))
    plane.ok("/resume")


def group(plane: Plane, table: Table, name: str, checks: Callable[[], None]) -> None:
    """Its checks; what breaks between two of them ends the group, and is one more that does not hold."""
    try:
        for path in ("/wake_up", "/resume"):  # whatever the group before it has left
            plane.post(path)
        checks()
    except FAULTS as error:
        why = f"{type(error).__name__}: {error}"
        table.rows.append((f"{name}: all of it could be tried", False, why))


def main(arguments: argparse.Namespace) -> int:
    key = ""
    if arguments.api_key_file:
        with open(arguments.api_key_file, encoding="utf-8") as file:
            key = file.read().split()[0]
    try:
        plane = Plane(arguments.url, key, arguments.model, arguments.long)
    except FAULTS as error:
        print(f"nobody to ask at {arguments.url}: {type(error).__name__}: {error}")
        return 1
    table = Table()
    groups: dict[str, list[Callable[[], None]]] = {
        "state": [lambda: state(plane, table)],
        "input": [lambda: bad_input(plane, table)],
        "lifecycle": [
            lambda mode=mode: lifecycle(plane, table, mode) for mode in ("abort", "wait", "keep")
        ],
        "caches": [lambda: caches(plane, table)],
        "sleep": [lambda: sleeping(plane, table)],
    }
    for name, parts in groups.items():
        for checks in parts if name not in arguments.without else ():
            group(plane, table, name, checks)
    for name in arguments.without:
        print(f"left out: {name}")
    return table.show()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--api-key-file", default="")
    parser.add_argument("--model", default="", help="its name (default: the first of /v1/models)")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of a long response")
    parser.add_argument("--without", action="append", default=[], choices=GROUPS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parsed()))
