"""What went wrong for others, over the wire: caches, hangs, versions (CASES: C, H, V)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

PROMPT = "A prompt that is a good deal longer than one block of the cache."


def _cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _version(answer: Any) -> str:
    return str(answer["choices"][0]["weight_version"])


def test_an_update_leaves_no_cache_of_the_old_weights(server: Any, other: Path) -> None:
    """KV of old weights was reused by new requests (C1, C2), also with a pause that keeps its KV."""
    told = {"return_weight_versions": True}
    for clear in (True, False):
        server.complete(PROMPT, 8, **told)
        old = server.complete(PROMPT, 8, **told)
        assert _cached(old) > 0
        # Computed again it would be a cache of the new weights; kept, it must not be found.
        beside = "Another, with nothing in common." if clear else PROMPT
        frozen = server.stream(beside, 600, **told).started()
        server.ok("/pause", mode="keep", clear_cache=clear)
        path = str(other) if clear else None
        server.ok("/update_weights_from_disk", {"model_path": path})
        server.ok("/resume")
        new = server.complete(PROMPT, 8, **told)
        assert _version(new) == server.get("/weight_version")["weight_version"] != _version(old)
        assert _cached(new) == 0
        assert new["choices"][0]["text"] != old["choices"][0]["text"]
        server.ok("/abort_requests")
        frozen.result()
        spans = frozen.last["weight_versions"]
        assert [span["version"] for span in spans] == [_version(old), _version(new)]
        assert (spans[0]["start"], spans[0]["end"]) == (0, spans[1]["start"])


def test_an_abort_keeps_tokens_and_their_log_probs(server: Any) -> None:
    """Partial tokens were lost (V5)."""
    running = server.stream(PROMPT, 900, logprobs=0, return_token_ids=True).started()
    server.ok("/pause", mode="abort")
    running.result()
    logprobs = [
        p
        for chunk in running.chunks
        for p in (chunk["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert len(logprobs) == len(running.tokens) > 0
    server.ok("/resume")
    whole = server.complete(PROMPT, len(running.tokens), return_token_ids=True)
    assert whole["choices"][0]["token_ids"] == running.tokens


def test_pauses_at_once_all_answer(server: Any) -> None:
    """A second pause overwrote the first one's reply (H6); a pause met the end of a request (H2)."""
    for round_ in range(5):
        running = server.stream(PROMPT, 3 + 40 * round_).started()
        modes = ["keep", "wait", "abort", "keep"]
        codes: list[int] = []

        def pause(mode: str, into: list[int] = codes) -> None:
            into.append(server.post("/pause", mode=mode).status_code)

        callers = [threading.Thread(target=pause, args=(mode,)) for mode in modes]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
        assert codes == [200] * 4
        assert server.is_paused() is True
        server.ok("/resume")
        running.result()
        assert running.last["finish_reason"] in ("abort", "length")


def test_an_update_leaves_pauses_as_they_were(server: Any, other: Path) -> None:
    """All later rollouts hung, or a paused engine was opened (H17)."""
    for paused in (False, True):
        if paused:
            server.ok("/pause", mode="keep")
        server.ok("/update_weights_from_disk", {"model_path": str(other)})
        assert server.is_paused() is paused
        refused = server.post("/update_weights_from_disk", {"weight_version": 0})
        assert refused.status_code == 409
        assert server.is_paused() is paused
    server.ok("/update_weights_from_disk")


def test_a_pause_ends_what_would_be_thrown_away(server: Any) -> None:
    """What no trainer will take was computed again all the same (V15)."""
    old = server.stream(PROMPT, 900).started()
    server.ok("/pause", mode="keep")
    server.ok("/update_weights_from_disk")
    server.ok("/resume")
    new = server.stream(PROMPT, 60).started()
    now = server.get("/weight_version")["weight_version"]
    assert old.pending
    refused = server.post("/pause", mode="abort", min_start_version=now)
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == ["query", "min_start_version"]
    assert server.is_paused() is False
    step = int(now.split(".")[1])  # of the newest incarnation
    report = server.ok("/pause", mode="wait", min_start_version=step)["report"]
    assert len(report["aborted"]) == 1
    assert (old.result().last["finish_reason"], old.last["retryable"]) == ("abort", False)
    assert (new.result().last["finish_reason"], len(new.chunks)) == ("length", 60)
    server.ok("/resume")
