"""Live KV when something goes wrong: no room, a release cut short, a file that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.contract import collect  # noqa: E402
from hotbunk.rollout.memory import NativePool  # noqa: E402

pytestmark = pytest.mark.anyio
LENGTH = 60


async def test_no_room_for_saved_kv_releases_nothing(
    tiny: Any, kit: Any, replica: Any, tmp_path: Path
) -> None:
    model = tiny()
    target = await replica(model, block_size=8, backup_dir=str(tmp_path))
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    made = frozen.made()
    os.rmdir(tmp_path)
    with pytest.raises(errors.HostOutOfMemory):
        await target.release_kv_cache(keep_kv=True)
    assert (await target.status()).kv == "RESIDENT"
    assert (await target.status()).health == "ok"
    assert await frozen.thaw() == frozen.goldens(model)
    assert frozen.computed == sum(LENGTH - n for n in made), "a refused release lost KV"


async def test_a_refused_release_does_not_harm_what_an_earlier_one_kept(
    tiny: Any, kit: Any, replica: Any, tmp_path: Path
) -> None:
    """The KV is away already; then there is no room for a backup of the weights."""
    model = tiny()
    target = await replica(model, block_size=8, backup_dir=str(tmp_path))
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    made = frozen.made()
    await target.release_kv_cache(keep_kv=True)
    os.rmdir(tmp_path)
    with pytest.raises(errors.HostOutOfMemory):
        await target.release(retention="backup", keep_kv=True)
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(model)
    assert frozen.computed == sum(LENGTH - n for n in made)


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_a_release_that_gave_back_too_little_did_lose_the_kv(
    tiny: Any, kit: Any, replica: Any, monkeypatch: pytest.MonkeyPatch, keep_kv: bool
) -> None:
    """ReleaseIncomplete says that the content is gone: nobody goes on over zeros."""
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    made = frozen.made()
    release = NativePool.release

    def short(self: NativePool, *args: Any, **kwargs: Any) -> Any:
        release(self, *args, **kwargs)  # the host's memory always comes back: only the word is off
        raise errors.ReleaseIncomplete(expected=2, measured=1)

    with monkeypatch.context() as patch:
        patch.setattr(NativePool, "release", short)
        with pytest.raises(errors.ReleaseIncomplete):
            await target.release_kv_cache(keep_kv=keep_kv)
    assert (await target.status()).kv == "RELEASED"
    await target.resume_kv_cache()
    assert await frozen.thaw() == frozen.goldens(model)
    again = frozen.computed > sum(LENGTH - n for n in made)
    assert again is not keep_kv


async def test_saved_kv_that_cannot_be_read_is_computed_again(
    tiny: Any, kit: Any, replica: Any, caplog: Any
) -> None:
    model = tiny()
    target = await replica(model, block_size=8)
    frozen = kit.frozen(target, kit.prompts(3, longest=20))
    await frozen.freeze()
    await target.release_kv_cache(keep_kv=True)
    target.backend._stash._file.truncate(100)
    await target.resume_kv_cache()
    assert "computed again" in caplog.text
    assert await frozen.thaw() == frozen.goldens(model)


async def test_closing_with_kv_away_leaves_nothing_open(
    tiny: Any, kit: Any, replica: Any, tmp_path: Path
) -> None:
    target = await replica(tiny(), block_size=8, backup_dir=str(tmp_path))
    frozen = kit.frozen(target, kit.prompts(2, longest=20))
    await frozen.freeze()
    await target.release_kv_cache(keep_kv=True)
    assert os.listdir(tmp_path) == [], "a file with a name outlives a killed process"
    saved = target.backend._stash._file
    await target.close()
    assert saved.closed
    for stream in frozen.streams:
        done = await collect(stream)
        assert (done.finish_reason, done.retryable) == ("abort", True)
