"""The plane in front of an engine that somebody else's package brings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENGINE = """
from dataclasses import replace
from hotbunk.rollout.backends.reference import create as reference

def create(**options):
    engine = reference(**options)
    engine.capabilities = replace(engine.capabilities, backend="theirs")
    return engine
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an entry point, as pip would leave it."""
    (tmp_path / "theirs.py").write_text(ENGINE)
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hotbunk.backends]\ntheirs = theirs:create\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("theirs")
def test_a_backend_from_elsewhere_is_served(serve: Callable[..., Any], model: Path) -> None:
    """Its options reach it, that of the prefix cache, too (C4); it is a server like ours (H16)."""
    server = serve(
        *("--backend", "theirs", "--model", str(model), "--dev"),
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--set", "max_num_seqs=4", "--set", "kv_cache_tokens=512"),
    )
    for path in ("/start_weight_update", "/finish_weight_update"):
        early = server.post(path)
        assert (early.status_code, early.json()["error"]["type"]) == (409, "SessionError")
        assert "init_weight_transfer_engine" in early.text
    for _ in range(2):
        usage = server.complete("A prompt of more than one block of KV.", 2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    told = server.get("/server_info")
    assert told["capabilities"]["backend"] == "theirs"
    assert server.complete("Hello", 4)["usage"]["completion_tokens"] == 4
    # 512 tokens of KV, as it was told: a longer request never fits.
    long = server.post("/v1/completions", {"prompt": [1] * 600, "max_tokens": 4})
    assert long.status_code == 400, long.text
    assert server.ok("/sleep", level=2)["status"] == "asleep"
    server.ok("/wake_up")
    assert server.ok("/update_weights_from_disk")["status"] == "committed"
    assert server.complete("Hello", 4)["usage"]["completion_tokens"] == 4
    assert server.end() == 0


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--backend", "referense", "--preset", "tiny"), "no backend named 'referense'"),
        (("--backend", "oracle", "--preset", "tiny"), "unknown option 'model'"),
        (("--preset", "tiny", "--set", "max_num_seq=4"), "did you mean 'max_num_seqs'"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_a_backend_cannot_be_told(arguments: tuple[str, ...], why: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", "serve", "--port", "0", "--dev", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert not done.stdout
