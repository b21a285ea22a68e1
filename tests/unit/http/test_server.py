"""A server's own rules: sessions in their order, keys, limits, clients that leave. Over oracles."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hotbunk.conformance.tickets import ticket
from hotbunk.rollout import errors
from hotbunk.rollout.contract import PauseMode, Ticket
from hotbunk.rollout.process import start_replica
from hotbunk.rollout.server import guard
from hotbunk.rollout.server.problems import from_problem, problem
from hotbunk.rollout.server.settings import digest_key, read_keys

pytestmark = pytest.mark.anyio
KEY = "a-key-that-only-tests-know"
LONG = 20_000


def _kind(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def _update(told: Ticket, step: int, **more: Any) -> dict[str, Any]:
    return {"ticket": msgspec.to_builtins(told), "version": f"0.{step}", **more}


def _asked(tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, **more}


async def _ok(client: Any, path: str, content: Any = None, **query: Any) -> Any:
    answer = await client.post(path, json=content, params=query)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return answer.json()


async def _idle(served: Any) -> None:
    async with asyncio.timeout(5):
        while True:
            status = await served.handle.status()
            if not (status.running or status.held or status.backend.running):
                return
            await asyncio.sleep(0.005)


# -- sessions ---------------------------------------------------------------------------------


async def test_out_of_turn_is_told_at_once(place: Any) -> None:
    """An update without init hung for five minutes (H16). Nor does a finish without a start do anything."""
    client = await place.client((await place.oracle()).url)

    async def state() -> list[Any]:
        status = (await client.get("/status")).json()
        return [status[part] for part in ("health", "groups", "kv", "versions", "pauses")]

    before = await state()
    update = _update(ticket(1), 1)
    verbs = ("/start_weight_update", "/update_weights", "/finish_weight_update")
    for path in (*verbs, "/abort_weight_update"):
        answer = await client.post(path, json=update if path == verbs[1] else None)
        assert _kind(answer) == (409, "SessionError"), path
        assert "init_weight_transfer_engine" in answer.text
    assert (await _ok(client, "/init_weight_transfer_engine"))["generation"] == 1
    for path in verbs[1:]:
        answer = await client.post(path, json=update if path == verbs[1] else None)
        assert _kind(answer) == (409, "SessionError")
        assert "start_weight_update" in answer.text
    assert await state() == before
    await _ok(client, "/start_weight_update", {"is_checkpoint_format": True})
    assert _kind(await client.post("/start_weight_update")) == (409, "SessionError")
    empty = await client.post("/finish_weight_update")
    assert _kind(empty) == (409, "SessionError")
    assert "nothing was updated" in empty.text
    kernel = {"is_checkpoint_format": False}
    assert _kind(await client.post("/start_weight_update", json=kernel)) == (400, "Unsupported")
    told = await _ok(client, "/update_weights", update)
    assert told["report"]["verified"] == "applied"
    wrong = await client.post("/finish_weight_update", json={"weight_version": "0.2"})
    assert _kind(wrong) == (409, "SessionError")
    done = await _ok(client, "/finish_weight_update", {"weight_version": "0.1"})
    assert (done["status"], done["ranks"]) == ("finished", 1)
    assert (await client.get("/weight_version")).json() == {"weight_version": "0.1"}


async def test_a_failed_update_may_be_sent_again_in_its_session(place: Any) -> None:
    client = await place.client((await place.oracle()).url)
    await _ok(client, "/init_weight_transfer_engine")
    await _ok(client, "/start_weight_update")
    told = ticket(1, sender="Corrupted", at=0, bucket_bytes=64)
    broken = await client.post("/update_weights", json=_update(told, 1))
    assert _kind(broken) == (503, "VerifyFailed")
    assert _kind(await client.post("/finish_weight_update")) == (409, "SessionError")
    poisoned = await client.post("/v1/completions", json=_asked())
    assert _kind(poisoned) == (503, "WeightsPoisoned")
    assert (await client.get("/health")).status_code == 200
    await _ok(client, "/update_weights", _update(ticket(1), 1))
    await _ok(client, "/finish_weight_update")
    await _ok(client, "/v1/completions", _asked())


@pytest.mark.parametrize("how", ["abort", "init"])
async def test_an_update_that_hangs_is_ended(place: Any, how: str) -> None:
    """By its own client, or by the next one, whose generation replaces it (H15)."""
    client = await place.client((await place.oracle()).url)
    first = (await _ok(client, "/init_weight_transfer_engine"))["generation"]
    await _ok(client, "/start_weight_update", {"generation": first})
    hanging = ticket(1, sender="Hanging", at=1, bucket_bytes=64)
    body = _update(hanging, 1, generation=first)
    running = asyncio.create_task(client.post("/update_weights", json=body))
    async with asyncio.timeout(5):
        while not (await client.get("/weight_info")).json()["updating"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    again = await client.post("/update_weights", json=body)
    assert _kind(again) == (409, "SessionError"), "one update at a time"
    disk = await client.post("/update_weights_from_disk")
    assert disk.status_code in (400, 409)
    if how == "abort":
        assert (await _ok(client, "/abort_weight_update"))["committed"] is None
    else:
        assert (await _ok(client, "/init_weight_transfer_engine"))["generation"] == first + 1
    ended = await running
    assert _kind(ended) == (409, "SessionError")
    assert "aborted" in ended.text
    info = (await client.get("/weight_info")).json()
    assert (info["updating"], info["session"], info["health"]) == (False, "open", "poisoned")
    if how == "init":
        for path in ("/start_weight_update", "/finish_weight_update", "/abort_weight_update"):
            stale = await client.post(path, json={"generation": first})
            assert _kind(stale) == (409, "SessionError")
            assert f"generation {first} is over" in stale.text
        assert _kind(await client.post("/update_weights", json=body)) == (409, "SessionError")
    await _ok(client, "/start_weight_update")
    await _ok(client, "/update_weights", _update(ticket(2), 2))
    await _ok(client, "/finish_weight_update")
    assert (await client.get("/weight_info")).json()["health"] == "ok"


async def test_an_update_outlives_the_client_that_asked_for_it(place: Any) -> None:
    """To cut it off half-way would poison what is whole in a moment."""
    served = await place.oracle(step_time=0.01)
    client = await place.client(served.url)
    await _ok(client, "/init_weight_transfer_engine")
    await _ok(client, "/start_weight_update")
    await _ok(client, "/pause", mode="keep")
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    body = json.dumps(_update(ticket(1, bucket_bytes=16), 1)).encode()
    head = f"POST /update_weights HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    await writer.drain()
    writer.close()
    async with asyncio.timeout(5):
        while (await client.get("/weight_version")).json()["weight_version"] != "0.1":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await _ok(client, "/finish_weight_update"))["report"]["version"]["step"] == 1


# -- who may ------------------------------------------------------------------------------------


async def test_control_is_not_there_unless_it_was_asked_for(place: Any) -> None:
    served = await place.oracle({"control": False})
    client = await place.client(served.url)
    schema = (await client.get("/openapi.json")).json()["paths"]
    assert set(schema) == {
        *("/health", "/metrics", "/v1/models"),
        *("/v1/completions", "/v1/chat/completions", "/v1/generate"),
    }
    for path in ("/pause", "/sleep", "/update_weights", "/collective_rpc", "/abort_requests"):
        assert (await client.post(path)).status_code == 404
    assert not (await served.handle.status()).is_paused
    with pytest.raises(errors.Unsupported, match="--dev"):
        await place.connect(served.url)
    await _ok(client, "/v1/completions", _asked())


async def test_a_key_is_needed_and_the_right_one(place: Any, tmp_path: Path) -> None:
    served = await place.oracle({"keys": (digest_key("another-key-entirely"), digest_key(KEY))})
    client = await place.client(served.url)
    schemes = (
        "",
        KEY,
        f"Basic {KEY}",
        "Bearer",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}x",
        "Bearer é",
    )
    for scheme in schemes:
        headers = {"Authorization": scheme.encode()} if scheme else {}
        for path in ("/pause", "/sleep", "/init_weight_transfer_engine", "/v1/completions"):
            refused = await client.post(path, headers=headers, json=_asked())
            assert refused.status_code == 401, (scheme, path)
            assert refused.headers["www-authenticate"] == "Bearer"
    assert not (await served.handle.status()).is_paused
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    right = {"Authorization": f"Bearer {KEY}"}
    assert (await client.post("/pause", headers=right)).status_code == 200
    assert (await client.post("/resume", headers=right)).status_code == 200
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(KEY + "\n")
    handle = await place.connect(served.url, api_key_file=str(file))
    await handle.pause_generation()
    await handle.resume_generation()
    file.write_text("not-the-key-at-all\n")
    with pytest.raises(errors.ConfigError, match="refused the key"):
        await place.connect(served.url, api_key_file=str(file))


def test_key_files_are_private_and_hold_real_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="others may read"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == (digest_key(KEY),)
    for content in ("", "short\n"):
        file.write_text(content)
        with pytest.raises(errors.ConfigError, match="one key a line"):
            read_keys(file)
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        read_keys(tmp_path / "nobody")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "127.0.0.1.evil.example:80"},
    ],
)
async def test_without_a_key_no_page_of_a_browser_gets_in(
    place: Any, headers: dict[str, str]
) -> None:
    """A page can post to loopback, under its own origin or a name that was made to point there."""
    served = await place.oracle()
    client = await place.client(served.url)
    for path in ("/pause", "/sleep", "/update_weights_from_disk"):
        assert (await client.post(path, headers=headers)).status_code == 403
    assert not (await served.handle.status()).is_paused


# -- limits, and clients that leave -------------------------------------------------------------


async def test_bodies_have_a_limit(place: Any) -> None:
    served = await place.oracle({"max_body_bytes": 2048})
    client = await place.client(served.url)
    big = json.dumps(_asked(prompt=[1] * 2000)).encode()

    async def pieces() -> Any:
        for at in range(0, len(big), 500):
            yield big[at : at + 500]

    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/generate", "/update_weights", "/sleep"):
        said = await client.post(path, content=big, headers=headers)
        assert said.status_code == 413, path
        try:
            unsaid = await client.post(path, content=pieces(), headers=headers)
        except httpx.TransportError:
            continue  # cut off while it was still sending
        assert unsaid.status_code == 413, path
    await _ok(client, "/v1/completions", _asked())


async def test_who_takes_too_long_to_ask_is_not_waited_for(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent, a head in drops, a body in drops; who has asked may wait for its answer."""
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    served = await place.oracle(step_time=0.01)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"

    async def answered(first: bytes, drop: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        reading = asyncio.create_task(reader.read())
        try:
            writer.write(first)
            while drop and not reading.done():
                writer.write(drop)
                await asyncio.sleep(0.05)
            return await reading
        except ConnectionError:
            return b""
        finally:
            reading.cancel()
            writer.close()

    async with asyncio.timeout(20):
        assert await answered(b"", b"") == b""
        assert await answered(head, b"X-a: b\r\n") == b""
        late = await answered(head + b"\r\n", b" ")
    assert late.startswith(b"HTTP/1.1 408"), late
    client = await place.client(served.url)
    whole = await _ok(client, "/v1/completions", _asked(200))  # two seconds
    assert whole["usage"]["completion_tokens"] == 200
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["running", "held", "frozen"])
async def test_a_client_that_leaves_leaves_nothing_running(
    place: Any, stream: bool, stage: str
) -> None:
    served = await place.oracle()
    if stage == "held":
        await served.handle.pause_generation()
    body = json.dumps(_asked(LONG, stream=stream, prompt=[[1, 2], [3, 4]])).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    async with asyncio.timeout(5):
        while True:
            status = await served.handle.status()
            if len(status.held if stage == "held" else status.backend.running) == 2:
                break
            await asyncio.sleep(0.005)
    if stage == "frozen":
        await served.handle.pause_generation(PauseMode.KEEP)
    writer.close()
    await _idle(served)


async def test_a_client_that_does_not_read_stalls_nobody(place: Any) -> None:
    """Its stream is held back; pauses of every mode, sleep and others' requests are not."""
    served = await place.oracle(step_time=0.0002)
    client = await place.client(served.url)
    for verb in (*PauseMode, None):
        # Anew for each: an abort ends them. A wait must see their end, so theirs is in reach.
        tokens = 800 if verb is PauseMode.WAIT else LONG
        writers = [await _never_reading(served, tokens) for _ in range(3)]
        await asyncio.sleep(0.3)
        await _ok(client, "/v1/completions", _asked(50))
        if verb is None:
            await _ok(client, "/sleep", level=1)
            await _ok(client, "/wake_up")
        else:
            await _ok(client, "/pause", mode=verb.value)
            await _ok(client, "/resume")
        for writer in writers:
            writer.close()
        await _idle(served)


async def _never_reading(served: Any, tokens: int) -> asyncio.StreamWriter:
    """The connection of a stream of which the first line was read, and nothing will be."""
    body = json.dumps(_asked(tokens, stream=True, logprobs=0, return_token_ids=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    await reader.readline()
    return writer


async def test_a_request_held_too_long_ends_with_a_retryable_abort(place: Any) -> None:
    served = await place.oracle(hold=0.2)
    client = await place.client(served.url)
    await _ok(client, "/pause")
    choice = (await _ok(client, "/v1/completions", _asked()))["choices"][0]
    assert (choice["finish_reason"], choice["retryable"]) == ("abort", True)
    assert "held longer than" in choice["error"]


async def test_an_engine_that_dies_is_told_as_503(place: Any) -> None:
    """Streams end with a retryable abort; health, requests and verbs say that it is lost."""
    replica = await start_replica("oracle", {"step_time": 0.005})
    place.closing.append(replica.close)
    served = await place.serve(replica)
    client = await place.client(served.url)
    body = _asked(900, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        os.kill(replica.pid, signal.SIGKILL)
        rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    last = rest[-1]["choices"][0]
    assert (last["finish_reason"], last["retryable"]) == ("abort", True)
    refused = await client.post("/v1/completions", json=_asked())
    assert _kind(refused) == (503, "ReplicaLost")
    assert _kind(await client.post("/pause")) == (503, "ReplicaLost")
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


async def test_leaving_turns_requests_away_and_says_so(place: Any) -> None:
    served = await place.oracle()
    client = await place.client(served.url)
    await _ok(client, "/pause", reject=True)
    away = await client.post("/v1/completions", json=_asked())
    assert _kind(away) == (503, "ReplicaRejecting")
    assert away.json()["error"]["retryable"] is True
    assert away.headers["retry-after"] == "1"


async def test_text_that_is_no_text_is_refused(place: Any) -> None:
    """JSON can say half a surrogate pair, and floats that are no numbers."""
    served = await place.oracle()
    client = await place.client(served.url)
    bodies = [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [1], "model": "\\udfff"}',
        b'{"prompt": [1], "stop": ["\\ud800"]}',
        b'{"prompt": [1], "request_id": "\\ud800"}',
        b'{"prompt": [1], "temperature": NaN}',
        b'{"prompt": [1], "temperature": 1e999}',
        b'{"prompt": [1], "seed": 99999999999999999999}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": [-1]}',
        b'{"prompt": [true]}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [1], "n": 1000000}',
        b'{"prompt": ' + b"[" * 20_000,
        b"\xff\xfe",
        b"",
    ]
    headers = {"Content-Type": "application/json"}
    for body in bodies:
        for path in ("/v1/completions", "/v1/generate", "/update_weights", "/weight_checker"):
            answer = await client.post(path, content=body, headers=headers)
            assert answer.status_code < 500, (path, body[:60], answer.text)
            if path == "/v1/completions":
                assert answer.status_code in (400, 422), (body[:60], answer.text)
    chat = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert (
        await client.post("/v1/chat/completions", content=chat, headers=headers)
    ).status_code == 422
    await _ok(client, "/v1/completions", _asked())


async def test_what_is_passed_on_unread_is_not_endlessly_deep(place: Any) -> None:
    """Every wire behind has a limit of its own, and breaks with whoever shares it."""
    client = await place.client((await place.oracle()).url)
    for depth, status in ((50, 200), (70, 422), (2_000, 422), (100_000, 422)):
        deep = b"[" * depth + b"]" * depth
        for field in (b"metadata", b"media"):
            body = b'{"request_id": "d", "prompt": [1], "%s": {"a": %s}}' % (field, deep)
            answer = await client.post("/v1/generate", content=body)
            assert answer.status_code == status, (depth, answer.text)
            await answer.aread()


def test_every_error_of_the_tree_comes_back_as_itself() -> None:
    """By name, with its fields and a status that is not 500 unless the engine failed."""
    made: list[errors.HotbunkError] = [
        errors.UnknownTag("t"),
        errors.Unsupported("verb", "backend", "hint"),
        errors.WeightsNotLoaded("target", "EMPTY"),
        errors.WeightsPoisoned("target"),
        errors.WeightsNotResident("target", "DISCARDED"),
        errors.KVNotResident(),
        errors.RequestsInFlight(["a", "b"], "release", 1.0),
        errors.SessionError("s"),
        errors.ReplicaLost("l"),
        errors.ReleaseIncomplete(10, 5),
        errors.ResumeOutOfMemory("weights", 10, 5),
        errors.HostOutOfMemory(10, 5),
        errors.UnknownNames(["a"]),
        errors.IncompleteUpdate(["a"]),
        errors.ShapeMismatch("a", "x", "y"),
        errors.BaseMismatch("1", "2"),
        errors.VersionRegression("2", "1"),
        errors.TransferFailed("t"),
        errors.VerifyFailed(["a"]),
        errors.DeadlineExceeded("s", 1.0),
        errors.ReplicaRejecting("r"),
        errors.EngineFailed("e"),
    ]
    for error in made:
        status, body = problem(error, "verb", traceback=True)
        assert (status == 500) is isinstance(error, errors.EngineFailed)
        back = from_problem(status, msgspec.json.encode(body))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert back.retryable == error.retryable
        for name, value in vars(error).items():
            assert getattr(back, name) == value or name == "remote_traceback"
    _, body = problem(RuntimeError("secret path"), "verb", traceback=False)
    assert "Traceback" not in json.dumps(body)
