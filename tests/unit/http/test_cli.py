"""``hotbunk serve``: what cannot be meant is said before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hotbunk.cli.serve import Options, run
from hotbunk.rollout.errors import ConfigError, MissingExtra

DEFAULT = Options(
    backend="reference",
    preset="tiny",
    model=None,
    host="127.0.0.1",
    port=0,
    dev=True,
    api_key_file=None,
    enable_prefix_caching=None,
    enable_prompt_tokens_details=False,
    strict_model=False,
    data_parallel=1,
    allowed_root=(),
    hold_deadline=600.0,
    settings=(),
)


@pytest.mark.parametrize(
    "more, why",
    [
        ({"preset": None}, "one of --preset and --model"),
        ({"model": Path("/nobody/there")}, "one of --preset and --model"),
        ({"preset": "huge"}, "no preset 'huge'"),
        ({"preset": None, "model": Path("/nobody/there")}, "has no config.json"),
        ({"host": "0.0.0.0"}, "is for loopback, not"),
        ({"host": "no such host", "dev": False}, "cannot listen on"),
        ({"api_key_file": Path("/nobody/there")}, "cannot be read"),
        ({"allowed_root": (Path("/nobody/there"),)}, "is no directory"),
        ({"settings": ("model=/tmp",)}, "--model's to say"),
    ],
)
def test_what_cannot_be_meant(
    more: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_CACHE", str(tmp_path))
    (tmp_path / "models" / "tiny-1").mkdir(parents=True)  # is not asked for its weights
    (tmp_path / "models" / "tiny-1" / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "models" / "tiny-1" / "byte_tokenizer.json").write_text(
        '{"type": "byte", "bos_id": 256, "eos_id": 257, "pad_id": 258}'
    )
    with pytest.raises(ConfigError, match=why):
        run(msgspec.structs.replace(DEFAULT, **more))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hotbunk.rollout.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtra, match="'fastapi'") as error:
        run(DEFAULT)
    assert "hotbunk[server]" in error.value.remedy
