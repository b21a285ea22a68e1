"""The suite against vLLM's own server, with nothing of ours in front: what it breaks is found and said."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.backends.vllm import SIZES
from hotbunk.conformance.case import REGISTRY, Status, all_cases
from hotbunk.conformance.kit import save_model, save_tokenizer
from hotbunk.conformance.runner import accepted, run_case
from hotbunk.conformance.under_test import BackendUnderTest

START_SECONDS = 200.0
ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
SERVE = [
    *("--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--block-size", "32"),
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--enable-prompt-tokens-details"),
]

# vLLM 0.32 on a CPU. Each is what the contract says, and what is seen instead.
BROKEN = {
    "bad_pause_modes_change_nothing": "answered 400",
    "bad_sleep_modes_change_nothing": "answered 400",
    "bad_levels_change_nothing": "answered 400",
    "bad_tags_change_nothing": "answered 200",
    "discarded_weights_never_serve": "WeightsNotLoaded was to be raised, and tokens",
    "no_kv_outlives_its_weights": "of older KV were reused",
    "owners_do_not_open_for_each_other": "ended another's pause",
    "callers_pause_survives_a_wake": "the wake ended the caller's pause",
    "abort_leaves_admission_open": "aborted ()",
    "bad_offers_name_the_names": "IncompleteUpdate was to be raised",
}
KEPT = ("goldens_of_two_versions", "pause_abort", "golden_after_a_discard_cycle")
UNSEEN = (
    "bytes_are_the_ones_sent",
    "another_rank_fails",
    "walk_backup",
    "partial_updates",
    "a_sender_is_asked_for_each_step_once",
    "finish_without_start",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("stock")
    model = save_model("llama", 0, folder / "model", **SIZES)
    save_tokenizer(model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--port", str(port), *SERVE),
        ],
        stdout=said,
        stderr=subprocess.STDOUT,
        env={**os.environ, **ENV},
        cwd=folder,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _answering(url, process, folder / "log")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        said.close()


def _answering(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"it did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def stock(server: str) -> Iterator[BackendUnderTest]:
    all_cases()
    it = under_test("url", url=server)
    yield it
    it.close()


@pytest.mark.anyio
@pytest.mark.parametrize("name", BROKEN)
async def test_what_it_breaks_is_seen(name: str, stock: BackendUnderTest) -> None:
    result = await run_case(REGISTRY[name], stock)
    assert result.status is Status.FAIL, result.detail
    assert BROKEN[name] in result.detail


@pytest.mark.anyio
@pytest.mark.parametrize("name", KEPT)
async def test_what_it_keeps_is_seen_too(name: str, stock: BackendUnderTest) -> None:
    result = await run_case(REGISTRY[name], stock)
    assert result.status is Status.PASS, result.detail
    assert "not looked at" in result.detail, "what was not seen was not noted"


@pytest.mark.anyio
@pytest.mark.parametrize("name", UNSEEN)
async def test_what_cannot_be_seen_is_said(name: str, stock: BackendUnderTest) -> None:
    result = await run_case(REGISTRY[name], stock)
    assert result.status is Status.NOT_RUN, result.detail
    assert accepted(result, stock), "it was not expected"
