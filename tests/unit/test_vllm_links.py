"""Where the sockets of vLLM's workers lie, without vLLM."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hotbunk.rollout.backends.vllm.links import Links
from hotbunk.rollout.process.grid import Grid


@pytest.mark.anyio
async def test_a_long_name_of_the_temporary_folder_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's name has 107 bytes; vLLM adds a UUID to the folder's."""
    long = tmp_path / ("n" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    links = Links(Grid(data=2))
    try:
        assert sorted(path.name for path in links.folder.iterdir()) == ["0", "1"]
        assert len(os.fsencode(links.folder)) + 1 + 36 <= 107
        assert links.folder.stat().st_mode & 0o777 == 0o700
        assert not list(long.iterdir())
    finally:
        await links.close()
    assert not links.folder.exists()
