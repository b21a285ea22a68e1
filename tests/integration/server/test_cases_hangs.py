"""What hung or met at the wrong moment for others, over the wire (CASES: H, and C where work is frozen)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "A prompt that is a good deal longer than one block of the cache."
MODES = ("abort", "wait", "keep")


class Calling(threading.Thread):
    """A call in the background."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        self.answer = self._call()

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive(), "it never answered"
        return self.answer


def _steps(server: Any) -> int:
    return int(server.get("/status")["backend"]["steps"])


def test_an_update_under_frozen_readers_and_a_resume_beside_it(server: Any, other: Path) -> None:
    """The update waited for ever for readers that a pause held, or a resume slipped into it (H1)."""
    old = server.get("/weight_version")["weight_version"]
    readers = [server.stream(f"{PROMPT} {n}", 200, **SPANS).started() for n in range(3)]
    server.ok("/pause", mode="keep")
    body = {"model_path": str(other)}
    updating = Calling(lambda: server.post("/update_weights_from_disk", body))
    resuming = Calling(lambda: server.post("/resume"))
    assert updating.result().status_code == 200
    assert resuming.result().status_code == 200
    assert server.is_paused() is False
    new = server.get("/weight_version")["weight_version"]
    for reader in readers:  # before the update or after it, never in the middle
        assert reader.result().last["finish_reason"] == "length"
        spans = reader.last["weight_versions"]
        assert [span["version"] for span in spans] in ([old], [old, new])
        assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
        assert spans[-1]["end"] == 200
    server.ok("/update_weights_from_disk")


SPANS = {"return_weight_versions": True}


def test_a_pause_ends_with_the_last_step_and_an_idle_one_costs_none(server: Any) -> None:
    """Kernels of an update raced the last forward; every pause cost 32 dummy steps (H7)."""
    running = server.stream(PROMPT, 900).started()
    server.ok("/pause", mode="keep")
    still = server.get("/status")["backend"]
    time.sleep(0.15)
    after = server.get("/status")["backend"]
    assert (after["steps"], after["tokens_generated"]) == (
        still["steps"],
        still["tokens_generated"],
    )
    server.ok("/resume")
    server.ok("/abort_requests")
    running.result()
    server.settled()
    before = _steps(server)
    for mode in MODES:
        for _ in range(5):
            server.ok("/pause", mode=mode)
            server.ok("/resume")
    assert _steps(server) == before


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_while_a_pause_drains_is_neither_lost_nor_waited_for(
    server: Any, mode: str
) -> None:
    """A request that came after the abort never returned, and the drain waited for it (H4)."""
    running = server.stream(PROMPT, {"wait": 100, "keep": 300}.get(mode, 900)).started()
    pausing = Calling(lambda: server.post("/pause", mode=mode))
    late = [server.stream(f"Late {n}", 5) for n in range(4)]
    assert pausing.result().status_code == 200
    held = server.until(lambda status: len(status["held"]) == 4)
    assert held["backend"]["running"] == []
    server.ok("/resume")
    for one in late:
        assert one.result().last["finish_reason"] == "length"
    wanted = {"abort": "abort", "wait": "length", "keep": "length"}[mode]
    assert running.result().last["finish_reason"] == wanted


def test_all_of_an_aborts_tokens_arrive(server: Any) -> None:
    """The pause stopped the loop that was to deliver the aborts (H3)."""
    server.settled()
    before = server.get("/status")["backend"]["tokens_generated"]
    running = [server.stream(f"{PROMPT} {n}", 900, return_token_ids=True) for n in range(6)]
    for one in running:
        one.started()
    report = server.ok("/pause", mode="abort")["report"]
    assert len(report["aborted"]) == 6
    for one in running:
        assert one.result().last["finish_reason"] == "abort"
    made = server.get("/status")["backend"]["tokens_generated"] - before
    assert sum(len(one.tokens) for one in running) == made
    server.ok("/resume")


def test_two_clients_of_one_engine_pause_within_one_another(server: Any) -> None:
    """A client's resume opened what another was in the middle of (H21)."""
    running = server.stream(PROMPT, 900).started()
    server.ok("/pause", mode="keep", owner="outer")
    server.ok("/pause", mode="keep", owner="inner")
    server.ok("/update_weights_from_disk")
    server.ok("/resume", owner="inner")
    server.ok("/resume", owner="inner")  # a client that repeats itself
    assert server.is_paused() is True
    count = server.get("/status")["backend"]["tokens_generated"]
    server.ok("/resume")  # somebody who holds nothing
    assert server.is_paused() is True
    assert server.get("/status")["backend"]["tokens_generated"] == count
    server.ok("/resume", owner="outer")
    assert server.is_paused() is False
    server.ok("/abort_requests")
    running.result()


def test_ranks_pause_and_go_on_together(ranked: Any) -> None:
    """One rank woke on a stale word while others sat in a collective (H8)."""
    name = ranked.get("/v1/models")["data"][0]["id"]
    for round_ in range(10):
        # New ones each time, which begin together: a fast engine is soon through with the first.
        ranked.ok("/pause", mode="keep")
        running = [ranked.stream(f"{PROMPT} {n}", 900, model=name) for n in range(4)]
        ranked.until(lambda status: len(status["held"]) == 4)
        ranked.ok("/resume")
        for one in running:
            one.started()
        told = ranked.ok("/pause", mode="keep", clear_cache=bool(round_ % 2))
        assert (told["ranks"], len(told["report"]["frozen"])) == (2, 4)
        ranked.ok("/resume")
        ranked.ok("/abort_requests")
        for one in running:
            assert one.result().last["finish_reason"] == "abort"


def test_a_frozen_request_whose_kv_went_is_computed_again(server: Any) -> None:
    """It went on with block tables that pointed at dropped KV (C3)."""
    whole = server.complete(PROMPT, 300, return_token_ids=True)["choices"][0]["token_ids"]
    running = server.stream(PROMPT, 300, return_token_ids=True).started()
    server.ok("/pause", mode="keep", clear_cache=False)
    assert running.pending
    server.ok("/release_kv_cache_memory")
    assert server.get("/status")["kv"] == "RELEASED"
    server.ok("/resume_kv_cache_memory")
    assert server.get("/status")["backend"]["kv_blocks_used"] == 0
    server.ok("/resume")
    assert running.result().last["finish_reason"] == "length"
    assert running.tokens == whole


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_pause_does_with_work_and_caches(server: Any, mode: str, clear: bool) -> None:
    """Some want frozen work computed again, some the stale KV: one table, nothing by chance (C9)."""
    server.complete(PROMPT, 2)
    length = 60 if mode == "wait" else 300
    running = server.stream("Something else altogether", length, return_token_ids=True).started()
    report = server.ok("/pause", mode=mode, clear_cache=clear)["report"]
    [key] = {"abort": report["aborted"], "wait": report["finished"], "keep": report["frozen"]}[mode]
    assert key.startswith("cmpl-")
    assert report["cleared_cache"] is clear
    kept = mode == "keep" and not clear
    assert (report["stale_tokens"] > 0) is kept
    assert (server.get("/status")["backend"]["kv_blocks_used"] > 0) is kept
    server.ok("/resume")
    again = server.complete(PROMPT, 2)
    assert (again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is not clear
    running.result()
    if mode == "keep":
        whole = server.complete("Something else altogether", length, return_token_ids=True)
        assert running.tokens == whole["choices"][0]["token_ids"]


def test_a_client_that_comes_again_takes_over(server: Any) -> None:
    """A trainer that restarted needed its server restarted, too (H15)."""
    first = server.ok("/init_weight_transfer_engine")["generation"]
    server.ok("/start_weight_update", {"generation": first})
    second = server.ok("/init_weight_transfer_engine")["generation"]
    assert second == first + 1
    for path in ("/start_weight_update", "/finish_weight_update", "/abort_weight_update"):
        stale = server.post(path, {"generation": first})
        assert (stale.status_code, stale.json()["error"]["type"]) == (409, "SessionError")
    server.ok("/start_weight_update", {"generation": second})
    server.ok("/abort_weight_update", {"generation": second})


def test_many_that_wait_leave_room_for_who_ends_them(server: Any) -> None:
    """Generate calls filled all there was, so neither a sync nor an abort got in (H10)."""
    server.ok("/pause", mode="keep")
    waiting = [server.stream(f"{n}", 5) for n in range(150)]
    server.until(lambda status: len(status["held"]) == 150, seconds=60)
    server.ok("/update_weights_from_disk")
    assert len(server.ok("/abort_requests")["aborted"]) == 150
    for one in waiting:
        assert one.result().last["finish_reason"] == "abort"
    server.ok("/resume")
