"""Whatever is generated from the OpenAPI schema, and clients that keep to no protocol at all.

Against an oracle in a thread, and against a real process whose exit, memory and open files are watched.
``HOTBUNK_FUZZ_SECONDS``: for so long, each (``make soak``).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis")

log = logging.getLogger(__name__)
SECONDS = float(os.environ.get("HOTBUNK_FUZZ_SECONDS", "0"))
ATTACK_SECONDS = SECONDS or 4
EXAMPLES = {"oracle": 2, "process": 1}  # of each kind, for each endpoint
KINDS = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
ATTACKER = Path(__file__).parents[1] / "programs" / "http_attacker.py"
MIB = 1 << 20
GROWTH = 150 * MIB  # of all processes together, once they are warm; one leaked body is 16 MiB
pytestmark = pytest.mark.timeout(300 + 3 * SECONDS)


class Target:
    """A server that is asked, and what it is by its own word."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self._http = httpx.Client(base_url=url, timeout=60)

    def close(self) -> None:
        self._http.close()

    def post(self, path: str, **query: Any) -> None:
        answer = self._http.post(path, params=query)
        assert answer.status_code == 200, f"{path}: {answer.text}"

    def state(self) -> tuple[Any, ...]:
        """Everything a refusal must leave alone."""
        status = self._http.get("/status").json()
        pauses = [(pause["owner"], pause["mode"]) for pause in status["pauses"]]
        update = self._http.get("/weight_info").json()
        session = [update[key] for key in ("session", "generation")]
        return status["groups"], status["versions"], status["kv"], pauses, status["health"], session

    def restore(self) -> None:
        """As before any case: awake, open, and with weights (an oracle has no disk to take them from)."""
        for owner, _ in self.state()[3]:
            self.post("/resume", owner=owner)
        self.post("/wake_up")
        if self.name == "process" and not self._http.get("/health").json()["servable"]:
            self._http.post("/abort_weight_update")
            self.post("/update_weights_from_disk")

    def settled(self) -> None:
        """Nothing runs, whoever asked for it has left."""
        end = time.monotonic() + 20
        while (status := self._http.get("/status").json())["running"] or status["held"]:
            assert time.monotonic() < end, status
            time.sleep(0.05)


@pytest.fixture(scope="module")
def oracle() -> Iterator[Target]:
    """A server in a thread, over an oracle."""
    from hotbunk.conformance.backends.hotbunk_http import Served
    from hotbunk.rollout.registry import create_backend
    from hotbunk.rollout.status import Deadlines

    engine = create_backend("oracle", step_time=0.0)
    one = Served(engine, Deadlines(hold=0.2, drain=2.0, memory=2.0, update=2.0, inspect=1.0))
    one.start()
    target = Target("oracle", one.url)
    yield target
    target.close()
    one.stop()


@pytest.fixture(scope="module")
def process(serve: Callable[..., Any], cache: Path) -> Iterator[Any]:
    """``hotbunk serve``, which must be the same process with the same means at the end."""
    server = serve("--preset", "tiny", "--dev", "--hold-deadline", "0.2")
    server.complete("Warm", 4)
    server.family = Family(server)
    yield server
    server.family.check()
    assert server.end() == 0


@pytest.fixture(params=["oracle", "process"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    found = request.getfixturevalue(request.param)
    yield found if isinstance(found, Target) else (made := Target("process", found.url))
    if not isinstance(found, Target):
        made.close()


class Family:
    """A server's process and those it made: which they are, and what they hold."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._root = psutil.Process(server.process.pid)
        self._pids, self._files, self._bytes = self._now()

    def warm(self) -> None:
        """All its paths have run once: what more it holds from now on, it keeps for nothing."""
        self._bytes = self._now()[2]

    def _now(self) -> tuple[list[int], int, int]:
        all_of_it = [self._root, *self._root.children(recursive=True)]
        files = sum(one.num_fds() for one in all_of_it)
        return sorted(p.pid for p in all_of_it), files, sum(p.memory_info().rss for p in all_of_it)

    def check(self) -> None:
        assert self._server.process.poll() is None, f"it ended with {self._server.process.poll()}"
        pids, files, size = self._now()
        log.info("open files %d -> %d", self._files, files)
        log.info("MiB %d -> %d", self._bytes // MIB, size // MIB)
        assert pids == self._pids, "a process was lost, or is left"
        assert files <= self._files + 20, f"{files} open files, {self._files} at first"
        assert size <= self._bytes + GROWTH


def test_the_schema_is_kept_by_whatever_is_generated_from_it(target: Target) -> None:
    """No 5xx but the stated 503, and a 4xx changes nothing."""
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    seen: dict[int, int] = {}
    end, rounds = time.monotonic() + SECONDS, 0
    while rounds == 0 or time.monotonic() < end:
        for operation in operations:
            for kind in KINDS:
                try:
                    _probe(target, operation, kind, seen, rounds)
                except Unsatisfiable:  # nothing that could be asked wrong
                    assert kind is not schemathesis.GenerationMode.POSITIVE, operation.label
        rounds += 1
    log.info("%s: %d rounds, answers %s", target.name, rounds, seen)
    assert seen.get(200, 0) > 15
    assert seen.get(422, 0) > 15


def _probe(target: Target, operation: Any, kind: Any, seen: dict[int, int], number: int) -> None:
    @settings(
        max_examples=EXAMPLES[target.name],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @seed(number)
    @given(case=operation.as_strategy(generation_mode=kind))
    def one(case: Any) -> None:
        before = target.state()
        answer = case.call(timeout=60, headers=_plain(case.headers))
        status = answer.status_code
        seen[status] = seen.get(status, 0) + 1
        told = f"{operation.label} {case.query} {case.body!r}: {status} {answer.text[:300]}"
        assert status < 500 or str(status) == "503" in operation.definition.raw["responses"], told
        if status >= 400:
            assert answer.json()["error"]["message"], told
        if 400 <= status < 500:
            assert target.state() == before, told
        target.restore()

    one()


def _plain(headers: Any) -> dict[str, str]:
    """Those of the generated headers that HTTP can carry."""
    return {
        key: value
        for key, value in dict(headers or {}).items()
        if isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value == value.strip()
    }


def test_clients_without_manners_change_nothing_for_others(process: Any) -> None:
    """Half requests, lies, depth, streams nobody reads: no 500, and nothing of it is left."""
    with closing(Target("process", process.url)) as target:
        _attack(process, target)
        process.family.warm()
        whole = _attack(process, target)
        target.restore()
        target.settled()
        assert greedy_text(process) == whole


def _attack(process: Any, target: Target) -> str:
    """Attacked and asked at the same time; what it always answered."""
    command = [sys.executable, str(ATTACKER), process.url, str(ATTACK_SECONDS), "7"]
    target.restore()
    target.settled()
    whole = greedy_text(process)  # before: an attack's pause may cut it off
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        try:
            served = 0
            while attack.poll() is None:
                served += _served_beside(process, target, whole)
            said = attack.communicate()[0]
        finally:
            attack.kill()
    log.info("%d served meanwhile; %s", served, said[-1000:])
    assert attack.returncode == 0, said
    assert served > 0
    return whole


def _served_beside(process: Any, target: Target, whole: str) -> int:
    """Whether a request was served. A pause or a sleep of theirs may hold it for too long."""
    target.restore()
    answer = process.post("/v1/completions", GREEDY)
    assert answer.status_code in (200, 503), answer.text
    if answer.status_code == 503:
        return 0
    [choice] = answer.json()["choices"]
    if choice["finish_reason"] != "length":
        assert choice["finish_reason"] == "abort"
        return 0
    assert choice["text"] == whole
    return 1


GREEDY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def greedy_text(server: Any) -> str:
    [choice] = server.ok("/v1/completions", GREEDY)["choices"]
    assert choice["finish_reason"] == "length", choice
    return str(choice["text"])
