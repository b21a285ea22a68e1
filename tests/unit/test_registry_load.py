"""Loading a transport where an engine's loop runs."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from hotbunk.rollout.contract import Ticket
from hotbunk.rollout.registry import TRANSPORTS, open_transfer, register

pytestmark = pytest.mark.anyio
SLOW = """
import time
time.sleep(0.6)
class Slow:
    @staticmethod
    async def open(ticket):
        return "opened"
"""


async def test_a_transport_that_imports_for_long_stalls_nobody_h11(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes seconds to import, and who hears nothing meanwhile kills the engine."""
    (tmp_path / "slow_transport_of_a_test.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    register(TRANSPORTS, "slow_of_a_test", "slow_transport_of_a_test:Slow")
    gaps = []

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    watching = asyncio.create_task(watch())
    opened = await open_transfer(Ticket("slow_of_a_test", "", 0, 1))
    watching.cancel()
    assert opened == "opened"  # type: ignore[comparison-overlap]
    assert "slow_transport_of_a_test" in sys.modules
    assert max(gaps) < 0.3
