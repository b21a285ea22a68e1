"""OpenAI's endpoints with vLLM's extras: what comes whole, in pieces, several at once, and why it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPT = "The future of AI is"


def _events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's chunks; it must end with [DONE]."""
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_is_the_whole_in_pieces(server: Any) -> None:
    body = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    whole = server.ok("/v1/completions", body)
    chunks = _events(server, "/v1/completions", body)
    pieces = [chunk["choices"][0] for chunk in chunks[:-1]]
    [choice] = whole["choices"]
    assert len(pieces) > 10
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [t for piece in pieces for t in piece["token_ids"]] == choice["token_ids"]
    logprobs = [p for piece in pieces for p in piece["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"] == list(PROMPT.encode())
    assert chunks[-1]["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for tops, token, own in zip(
        choice["logprobs"]["top_logprobs"],
        choice["logprobs"]["tokens"],
        choice["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert token in tops
        assert own <= 0
    ids = server.ok("/v1/completions", {**body, "return_tokens_as_token_ids": True})
    assert ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_text_and_token_ids_are_the_same_prompt_one_or_many(server: Any) -> None:
    other = "Something else"
    one = server.complete(PROMPT)["choices"][0]
    assert server.complete(list(PROMPT.encode()))["choices"][0] == one
    for many in ([PROMPT, other], [list(PROMPT.encode()), list(other.encode())]):
        told = server.complete(many)
        assert [c["index"] for c in told["choices"]] == [0, 1]
        assert told["choices"][0] == one
        assert told["choices"][1]["text"] == server.complete(other)["choices"][0]["text"]
        assert told["usage"]["prompt_tokens"] == len(PROMPT) + len(other)


def test_a_seed_repeats_and_n_draws_differ(server: Any) -> None:
    drawn = {"temperature": 1.0, "seed": 7, "n": 3}
    one, two = (server.complete(PROMPT, 12, **drawn)["choices"] for _ in range(2))
    assert one == two
    assert [choice["index"] for choice in one] == [0, 1, 2]
    assert len({choice["text"] for choice in one}) == 3
    other = server.complete(PROMPT, 12, **{**drawn, "seed": 8})["choices"]
    assert other != one


def test_what_ends_a_response(server: Any) -> None:
    full = server.complete(PROMPT, 30, return_token_ids=True)["choices"][0]
    text, tokens = full["text"], full["token_ids"]
    at = next(n for n in range(3, 25) if text[n : n + 2].isascii() and len(text[n : n + 2]) == 2)
    stop = text[at : at + 2]
    first = text.find(stop)
    cut = server.complete(PROMPT, 30, stop=[stop, "never in it at all"])["choices"][0]
    assert cut["text"] == text[:first]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = server.complete(PROMPT, 30, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: first + 2]
    pieces = _events(
        server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 30} | _GREEDY | {"stop": stop}
    )
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text[:first]
    token = server.complete(PROMPT, 30, stop_token_ids=[tokens[5]])["choices"][0]
    assert (token["finish_reason"], token["stop_reason"]) == ("stop", tokens[5])


_GREEDY = {"temperature": 0, "ignore_eos": True}


def test_chats(server: Any) -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        **_GREEDY,
    }
    told = server.ok("/v1/chat/completions", body)
    [choice] = told["choices"]
    assert told["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"]) == 9
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    plain = server.complete("system: Be brief.\nuser: Hello\nassistant: ", 9)["choices"][0]
    assert choice["message"]["content"] == plain["text"]
    pieces = [chunk["choices"][0] for chunk in _events(server, "/v1/chat/completions", body)]
    assert pieces[0]["delta"]["role"] == "assistant"
    assert "".join(p["delta"]["content"] for p in pieces) == choice["message"]["content"]
    more = {"temperature": 1.0, "seed": 7, "return_token_ids": True, "return_weight_versions": True}
    drawn = server.ok("/v1/chat/completions", {**body, **more})["choices"][0]
    again = server.ok("/v1/chat/completions", {**body, **more})["choices"][0]
    other = server.ok("/v1/chat/completions", {**body, **more, "seed": 8})["choices"][0]
    assert drawn["token_ids"] == again["token_ids"] != other["token_ids"]
    assert [span["end"] for span in drawn["weight_versions"]] == [9]
    ended = {**body, **more, "stop_token_ids": [drawn["token_ids"][4]]}
    cut = server.ok("/v1/chat/completions", ended)["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert len(cut["token_ids"]) <= 5
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert server.post("/v1/chat/completions", {"messages": image}).status_code == 422


def test_what_is_not_done_is_refused_and_not_ignored(server: Any) -> None:
    for key, value in (
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("echo", True),
        ("best_of", 3),
        ("guided_regex", "a*"),
        ("response_format", {"type": "json_object"}),
    ):
        answer = server.post("/v1/completions", {"prompt": "x", key: value})
        assert answer.status_code == 400, key
        assert answer.json()["error"]["type"] == "Unsupported"
        assert key in answer.json()["error"]["message"]
    neutral = {"frequency_penalty": 0, "echo": False, "best_of": None, "user": "u", "store": True}
    server.ok("/v1/completions", {"prompt": "x", "max_tokens": 2, **neutral})


def test_what_could_never_run_is_400(server: Any) -> None:
    for more in ({"max_tokens": 5000}, {"prompt": [300]}, {"prompt": "x" * 2000}, {"prompt": ""}):
        answer = server.post("/v1/completions", {"prompt": "x", **more})
        assert answer.status_code == 400, more
        assert answer.json()["error"]["message"]


def test_names_are_anybodys_unless_they_are_strict(server: Any, ranked: Any, model: Any) -> None:
    assert server.get("/v1/models")["data"][0]["id"] == "tiny"
    assert server.ok("/v1/completions", {"model": "gpt-9", "prompt": "x"})["model"] == "gpt-9"
    own = ranked.get("/v1/models")["data"][0]["id"]
    assert own == model.name
    assert ranked.ok("/v1/completions", {"model": own, "prompt": "x"})["model"] == own
    refused = ranked.post("/v1/completions", {"model": "gpt-9", "prompt": "x"})
    assert refused.status_code == 404
    assert httpx.post(f"{ranked.url}/v1/completions", json={"prompt": "x"}).status_code == 401


def test_metrics_are_prometheus(server: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        page = server.http.get("/metrics")
        families = text_string_to_metric_families(page.text)
        return {s.name: s.value for family in families for s in family.samples if not s.labels}

    before = read()
    server.complete(PROMPT, 8)
    server.ok("/pause")
    after = read()
    assert after["hotbunk_response_tokens_total"] == before["hotbunk_response_tokens_total"] + 8
    assert (
        after["hotbunk_first_token_seconds_count"]
        == before["hotbunk_first_token_seconds_count"] + 1
    )
    assert (before["hotbunk_paused"], after["hotbunk_paused"]) == (0, 1)
    assert after["hotbunk_kv_blocks_total"] > 0


def test_bare_it_has_no_verbs_and_tells_no_details(
    server: Any, serve: Any, model: Path, tmp_path: Path
) -> None:
    """Neither ``--dev`` nor a key, nor ``--enable-prompt-tokens-details``; an end is heard, or not."""
    server.ok("/update_weights_from_disk")
    tokens = server.complete(PROMPT, 40, return_token_ids=True)["choices"][0]["token_ids"]
    ending = shutil.copytree(model, tmp_path / "ending")
    config = json.loads((ending / "config.json").read_text())
    (ending / "config.json").write_text(json.dumps({**config, "eos_token_id": tokens[20]}))
    bare = serve("--model", str(ending))
    for path in ("/pause", "/sleep", "/update_weights", "/reset_prefix_cache", "/abort_requests"):
        assert bare.post(path).status_code == 404, path
    assert bare.http.get("/status").status_code == 404
    whole = bare.complete(PROMPT, 40)
    assert whole["usage"]["prompt_tokens_details"] is None
    assert whole["choices"][0]["finish_reason"] == "length", "it was told to go on"
    heard = bare.complete(PROMPT, 40, ignore_eos=False, return_token_ids=True)["choices"][0]
    assert heard["finish_reason"] == "stop"
    assert heard["token_ids"] == tokens[: tokens.index(tokens[20]) + 1]
