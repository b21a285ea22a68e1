"""Our transfers as a weight-transfer engine of vLLM: one hop from the trainer into the worker.

Known to vLLM by name through :mod:`.plugin`. The adapter drives it through :mod:`.inside`. A stock
server reaches it through vLLM's own routes, where ``update_info`` of ``/update_weights`` is a
ticket, and each worker opens its own end of the transfer: all ranks accept before any writes, and
commit together, by the transport's own vote.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hotbunk.rollout import errors
from hotbunk.rollout.arena import Arena
from hotbunk.rollout.backends.vllm.weights import Weights
from hotbunk.rollout.contract import Ticket
from hotbunk.rollout.process.wire_errors import as_text
from hotbunk.rollout.registry import open_transfer


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: a ticket says all, and comes with each update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A :class:`~hotbunk.rollout.contract.Ticket`, without the rank, and the seconds it may take."""

    transport: str
    address: str
    ranks: int = 1
    published: bool = False
    deadline: float = 600.0


class HotbunkWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives what a ticket offers, in one chunk a session.

    A session that fails is over at once, and leaves nothing that a later one could meet: what was
    sent goes to its place as it comes, or is gone.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    arena: Arena | None = None  # where the parameters lie, if they lie in one
    received = False
    _weights: Weights | None = None

    def weights(self) -> Weights:
        """The model's weights; found at the first call, which must come before the first update."""
        if self._weights is None:
            self._weights = Weights(self.model, self.vllm_config, self.arena)
        return self._weights

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find where everything lies.

        :raises ConfigError: some tensor is out of reach, or not what was loaded any more.
        """
        found = self.weights().found()
        for what in ("transformed", "uncovered"):
            if found[what]:
                raise errors.ConfigError(f"these tensors are {what}: {errors.shown(found[what])}")

    def start_weight_update(self) -> None:
        self.received = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Open the ticket here, and take what it offers.

        :raises HotbunkError: see the transport, and :meth:`Weights.receive`.
        """
        if self._weights is None:
            raise errors.SessionError(
                "the weight-transfer engine was not initialised",
                remedy="call init_weight_transfer_engine first",
            )
        if self.received:
            raise errors.SessionError("this session has had its update")
        try:
            asyncio.run(self._receive(update_info))
        except errors.HotbunkError as error:
            # vLLM passes on nothing of it but its words.
            raise RuntimeError(as_text("update_weights", error)) from error
        self.received = True

    def finish_weight_update(self) -> None:
        if not self.received:
            raise errors.SessionError("no weights were received in this session")

    def abort(self) -> None:
        """A session failed elsewhere than in :meth:`receive_weights`."""
        self.received = False
        self.reset_weight_update_target()

    def shutdown(self) -> None:
        """Nothing is held between sessions."""

    async def _receive(self, info: UpdateInfo) -> None:
        parallel: Any = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        ranks = 1 if info.published else info.ranks
        ticket = Ticket(
            info.transport, info.address, 0 if info.published else rank, ranks, info.published
        )
        async with asyncio.timeout(info.deadline):
            transfer = await open_transfer(ticket)
            manifest = transfer.manifest
            try:
                await self.weights().receive(transfer, manifest.version, manifest.scope)
            except BaseException as error:
                await transfer.abort(error)
                raise
