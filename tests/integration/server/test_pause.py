"""Pausing over HTTP: the four end-to-end designs of asynchronous RL."""

from __future__ import annotations

import time
from typing import Any

import pytest

MODES = ["abort", "wait", "keep"]
LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 2  # many blocks of 16
MOMENT = 0.15  # in which an engine that can make tokens makes many


def test_pause_resume_state_is_idempotent_across_cycles(server: Any) -> None:
    assert server.is_paused() is False
    for _ in range(2):
        server.ok("/resume")
        assert server.is_paused() is False
    for _ in range(2):
        for mode in MODES:
            for _ in range(2):
                server.ok("/pause", mode=mode)
                assert server.is_paused() is True
            for _ in range(2):
                server.ok("/resume")
                assert server.is_paused() is False


@pytest.mark.parametrize("paused", [False, True])
def test_invalid_pause_mode_preserves_state(server: Any, paused: bool) -> None:
    if paused:
        server.ok("/pause", mode="keep")
    before = server.get("/status")["pauses"]
    for mode in ("invalid", "KEEP", "", "abort,keep"):
        answer = server.post("/pause", mode=mode)
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["query", "mode"]
        assert server.is_paused() is paused
    after = server.get("/status")["pauses"]
    assert [(p["owner"], p["mode"]) for p in after] == [(p["owner"], p["mode"]) for p in before]


@pytest.mark.parametrize("mode", MODES)
def test_pause_mode_request_lifecycle(server: Any, mode: str) -> None:
    """What runs ends with an abort, ends by itself or stands still; what comes later waits."""
    length = 100 if mode == "wait" else 400
    running = server.stream("Once upon a time", length, return_token_ids=True).started()
    server.ok("/pause", mode=mode)
    if mode == "keep":
        time.sleep(MOMENT)  # chunks on their way
        count = len(running.chunks)
        assert running.pending
        assert 0 < count < length
    else:
        running.result()
        assert running.ended_well
        wanted = {"abort": "abort", "wait": "length"}[mode]
        assert running.last["finish_reason"] == wanted
        assert (len(running.tokens) == length) is (mode == "wait")
    if mode == "abort":
        assert running.last["retryable"] is True
    late = server.stream("A late one", 5)
    time.sleep(MOMENT)
    assert late.pending
    assert not late.chunks
    if mode == "keep":
        assert len(running.chunks) == count, "a frozen request went on"
    server.ok("/resume")
    late.result()
    assert (late.status, late.last["finish_reason"]) == (200, "length")
    if mode == "keep":
        running.result()
        assert running.last["finish_reason"] == "length"
        whole = server.complete("Once upon a time", length, return_token_ids=True)
        assert running.tokens == whole["choices"][0]["token_ids"]
        assert running.text == whole["choices"][0]["text"]


def _golden(answer: Any) -> tuple[Any, ...]:
    choice, usage = answer["choices"][0], answer["usage"]
    return (
        choice["text"],
        choice["finish_reason"],
        choice["logprobs"]["tokens"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def _cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_clear_cache_preserves_output_and_controls_prefix_cache(server: Any) -> None:
    def cycle(clear: bool) -> None:
        server.ok("/pause", mode="abort", clear_cache=clear)
        server.ok("/resume")

    def ask() -> Any:
        return server.complete(LONG, 12, logprobs=1)

    cycle(clear=True)
    r0 = ask()
    assert _cached(r0) == 0
    r1 = ask()
    assert _golden(r1) == _golden(r0)
    assert _cached(r1) > 0, "the cache is not warm, so the rest would prove nothing"
    cycle(clear=False)
    r2 = ask()
    assert _golden(r2) == _golden(r0)
    assert _cached(r2) > 0
    cycle(clear=True)
    r3 = ask()
    assert _golden(r3) == _golden(r0)
    assert _cached(r3) == 0
    server.ok("/reset_prefix_cache")
    assert _cached(ask()) == 0


def test_a_callers_pause_survives_sleep_and_wake(server: Any) -> None:
    server.ok("/pause", mode="keep", clear_cache=False)
    server.ok("/sleep", level=1)
    server.ok("/wake_up")
    assert server.is_paused() is True
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    server.ok("/resume")
    assert server.is_paused() is False


def test_an_aborted_response_is_named_by_its_id(server: Any) -> None:
    """vLLM's own endpoint does nothing for the id that a client has (A1)."""
    one = server.stream("Once upon a time", 900).started()
    two = server.stream("Twice upon a time", 900).started()
    named = one.chunks[0]["id"]
    report = server.ok("/abort_requests", {"request_ids": [named, "nobody"]})
    assert (report["aborted"], report["unknown"]) == ([named], ["nobody"])
    assert one.result().last["finish_reason"] == "abort"
    assert two.pending
    assert server.is_paused() is False
    assert server.ok("/abort_requests")["aborted"] == [two.chunks[0]["id"]]
    assert two.result().last["finish_reason"] == "abort"
