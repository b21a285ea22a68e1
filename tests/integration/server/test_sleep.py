"""Sleep and wake over HTTP: the third document's sequence, as its curl commands have it."""

from __future__ import annotations

import time
from typing import Any

import pytest

PROMPT = "The future of AI is"
BODY = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "prompt": PROMPT, "max_tokens": 7, "temperature": 0}


def _text(server: Any) -> str:
    return str(server.ok("/v1/completions", BODY)["choices"][0]["text"])


def _sleeping(server: Any) -> bool:
    return bool(server.get("/is_sleeping")["is_sleeping"])


def test_the_third_documents_sequence(server: Any) -> None:
    before = _text(server)
    slept = server.ok("/sleep", {"level": "1"})
    assert slept["resident_bytes"] == 0
    assert slept["report"]["freed"] > 0
    assert _sleeping(server)
    server.ok("/wake_up")
    assert not _sleeping(server)
    assert _text(server) == before, "after level 1 serving is open, with the same weights"

    server.ok("/sleep", {"level": "1"})
    server.ok("/sleep", {"level": "2"})
    assert _sleeping(server)
    server.ok("/wake_up")
    server.ok("/wake_up", tags="weights")
    assert not _sleeping(server)
    refused = server.post("/v1/completions", BODY)
    assert refused.status_code == 503
    assert "no content" in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "WeightsNotLoaded"
    assert server.http.get("/health").status_code == 200
    server.ok("/update_weights_from_disk")
    assert _text(server) == before


@pytest.mark.parametrize("level", ["query", "body"])
@pytest.mark.parametrize("how", [int, str])
def test_a_level_is_a_number_or_a_string_anywhere(server: Any, level: str, how: type) -> None:
    """Stock vLLM reads the query alone: a body with level 2 means 1 to it."""
    for wanted, state in ((1, "BACKED_UP"), (2, "DISCARDED")):
        if level == "query":
            server.ok("/sleep", level=how(wanted))
        else:
            server.ok("/sleep", {"level": how(wanted)})
        assert server.get("/weight_info")["groups"]["target"].startswith(state)


def test_level_0_is_a_pause_that_wake_up_ends(server: Any) -> None:
    server.ok("/sleep", level=0)
    assert _sleeping(server)
    assert server.get("/weight_info")["groups"]["target"].startswith("RESIDENT")
    server.ok("/wake_up")
    assert (_sleeping(server), server.is_paused()) == (False, False)


def test_staged_wake_around_an_update(server: Any, other: Any) -> None:
    before = _text(server)
    server.ok("/sleep", level=2)
    early = server.post("/update_weights_from_disk", {"model_path": str(other)})
    assert (early.status_code, early.json()["error"]["type"]) == (409, "WeightsNotResident")
    server.ok("/wake_up", tags="weights")
    assert _sleeping(server), "the KV cache is still away"
    server.ok("/update_weights_from_disk", {"model_path": str(other)})
    server.http.post("/wake_up?tags=weights&tags=kv_cache").raise_for_status()
    assert not _sleeping(server)
    changed = _text(server)
    assert changed != before
    server.ok("/update_weights_from_disk")
    assert _text(server) == before


def test_a_request_during_sleep_waits_for_the_wake(server: Any) -> None:
    server.ok("/sleep", level=1)
    late = server.stream(PROMPT, 5)
    time.sleep(0.1)
    assert late.pending
    server.ok("/wake_up")
    assert late.result().last["finish_reason"] == "length"


def test_kv_alone_comes_and_goes(server: Any) -> None:
    before = _text(server)
    assert server.ok("/release_kv_cache_memory")["report"]["freed"] > 0
    refused = server.post("/v1/completions", BODY)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "KVNotResident")
    server.ok("/resume_kv_cache_memory")
    assert _text(server) == before


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/sleep", {"level": "3"}, "level"),
    ("/sleep", {"level": "1.0"}, "level"),
    ("/sleep", {"level": "-1"}, "level"),
    ("/sleep", {"level": "two"}, "level"),
    ("/sleep", {"level": "1", "mode": "nap"}, "mode"),
    ("/wake_up", {"tags": "weight"}, "tags"),
    ("/wake_up", {"tags": ["weights", "graphs"]}, "tags"),
    ("/wake_up", {"tags": ""}, "tags"),
    ("/pause", {"clear_cache": "perhaps"}, "clear_cache"),
]


@pytest.mark.parametrize("asleep", [False, True])
def test_bad_words_change_nothing(server: Any, asleep: bool) -> None:
    if asleep:
        server.ok("/sleep", level=1)
    before = server.get("/status")
    for path, query, where in BAD:
        answer = server.http.post(path, params=query)
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["query", where]
    for level in (True, 3, 1.0, "x", [], {}):
        answer = server.post("/sleep", {"level": level})
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"][:2] == ["body", "level"]
    after = server.get("/status")
    for key in ("groups", "kv", "is_paused", "is_sleeping"):
        assert after[key] == before[key]


def test_a_word_that_is_not_known_is_not_ignored(server: Any) -> None:
    """A level that is misspelt would else be 1."""
    assert server.post("/sleep", {"lvl": 2}).status_code == 422
    conflict = server.post("/sleep", {"level": 2}, level=1)
    assert conflict.status_code == 422
    assert not _sleeping(server)
