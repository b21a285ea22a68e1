"""A relay that is given up, in every moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.contract import TensorSpec, Version
from hotbunk.rollout.errors import TransferFailed
from hotbunk.rollout.http.relay import _Relayed

pytestmark = pytest.mark.anyio


class Hanging(MemoryTransfer):
    async def accept(self, *args: Any) -> bool:
        return bool(await asyncio.get_running_loop().create_future())


async def test_given_up_as_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stops it when its question is on the way, and nobody knows of it yet."""
    transfer = Hanging([(TensorSpec("a", (1,), "float32", 4), bytes(4))], version=Version(0, 1))
    source = _Relayed(transfer)
    asked = asyncio.run_coroutine_threadsafe

    def stopped_meanwhile(*args: Any) -> Any:
        waiting = asked(*args)
        source.stop()
        return waiting

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", stopped_meanwhile)
    walk = asyncio.ensure_future(asyncio.to_thread(list, source.tensors()))
    done, _ = await asyncio.wait({walk}, timeout=10)
    if not done and source._waiting is not None:
        source._waiting.cancel()  # or its thread outlives the test
    with pytest.raises(TransferFailed, match="given up"):
        await walk
    assert done, "its thread waits for an answer that nobody will give"
