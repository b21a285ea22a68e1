"""Whose token it is, over the wire (CASES: V): labels, spans, aborts that continue, updates that fail."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import FinishReason, PauseMode, Version, collect
from hotbunk.rollout.partial import PartialPolicy, PartialRollout

PROMPT = "Once upon a time"


def _kind(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def test_an_update_in_keep_mode_aborts_nobody(server: Any, other: Path) -> None:
    """Publishing a version aborted what the pause had kept (V12); spans cover all of it (V7), and each
    chunk says the version that made it (V6)."""
    running = [
        server.stream(f"{PROMPT} {n}", 300, return_weight_versions=True, return_token_ids=True)
        for n in range(6)
    ]
    for one in running:
        one.started()
    old = server.get("/weight_version")["weight_version"]
    for path in (str(other), None):
        server.ok("/pause", mode="keep")
        assert len(server.get("/status")["running"]) == 6
        server.ok("/update_weights_from_disk", {"model_path": path})
        server.ok("/resume")
    new = server.get("/weight_version")["weight_version"]
    for one in running:
        assert one.result().last["finish_reason"] == "length"
        spans = one.last["weight_versions"]
        assert (spans[0]["version"], spans[-1]["version"]) == (old, new)
        assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
        assert spans[-1]["end"] == len(one.tokens) == 300
        said = [c["choices"][0]["weight_version"] for c in one.chunks]
        assert said.count(old) >= spans[0]["end"]


def test_an_update_that_fails_moves_no_label(server: Any, model: Path, other: Path) -> None:
    """The label was the new one, the weights were not (V8)."""
    before = server.complete(PROMPT, 8)["choices"][0]["text"]
    held = server.get("/weight_version")
    broken = other / "broken"
    shutil.copytree(model, broken)
    try:
        [file] = broken.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1000])
        assert server.post(
            "/update_weights_from_disk", {"model_path": str(broken)}
        ).status_code in (400, 409, 503)
        assert server.get("/weight_version") == held
        assert server.complete(PROMPT, 8)["choices"][0]["text"] == before
    finally:
        shutil.rmtree(broken)


def test_a_version_is_the_trainers_and_never_goes_back(server: Any, model: Path) -> None:
    """Engines told the model's path (V10), took step 0 again (V16) or fell behind (V11)."""
    incarnation = int(server.get("/weight_version")["weight_version"].split(".")[0]) + 1
    given = {"incarnation": incarnation, "step": 41}
    server.ok("/update_weights_from_disk", {"weight_version": given})
    assert server.get("/weight_version") == {"weight_version": f"{incarnation}.41"}
    for lower in (40, 0, f"{incarnation - 1}.99"):
        answer = server.post("/update_weights_from_disk", {"weight_version": lower})
        assert _kind(answer) == (409, "VersionRegression")
    assert server.get("/weight_version") == {"weight_version": f"{incarnation}.41"}
    assert server.get("/status")["newest"]["target"] == given
    for wrong in (str(model), "latest", -1, True, None, 1.5):
        answer = server.post("/update_weights_from_disk", {"weight_version": wrong})
        assert answer.status_code == (200 if wrong is None else 422), wrong


@pytest.mark.anyio
@pytest.mark.parametrize("from_prompt", [False, True])
async def test_what_a_pause_cut_off_goes_on_at_the_client(
    server: Any, kit: Any, from_prompt: bool
) -> None:
    """Totals exceeded the limit (V1), log-probs came twice (V3), versions were mixed where they were
    not to be (V2)."""
    handle = await HttpHandle.connect(HttpOptions(server.url))
    client = PartialRollout([handle], PartialPolicy(from_prompt=from_prompt))
    request = kit.request(kit.prompts(1)[0], 300)
    cuts = 0

    first = asyncio.Event()

    def seen(chunk: Any) -> None:
        if chunk.token_ids:
            first.set()

    try:
        whole = await collect(handle.generate(request))
        running = asyncio.create_task(client.generate(request, seen=seen))
        for _ in range(3):
            await first.wait()
            first.clear()
            report = await handle.pause_generation(PauseMode.ABORT)
            cuts += len(report.aborted)
            newest = (await handle.status()).newest["target"]
            version = Version(newest.incarnation, newest.step + 1)
            await asyncio.to_thread(
                server.ok, "/update_weights_from_disk", {"weight_version": str(version)}
            )
            await handle.resume_generation()
        result = await running
    finally:
        await handle.close()
    done = result.completion
    assert done.finish_reason is FinishReason.LENGTH
    assert result.continuations == cuts > 0
    assert done.token_ids == whole.token_ids  # the same weights under every label
    assert len(done.logprobs) == len(done.token_ids) == 300
    assert done.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert [s.start for s in done.spans] == [0, *(s.end for s in done.spans[:-1])]
    assert done.spans[-1].end == 300
    assert (len(done.spans) == 1) is from_prompt
    assert (result.dropped_tokens > 0) is from_prompt
