"""The weights of one vLLM worker: what a sync may write, and how it is written and read back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import nn
from vllm.model_executor.model_loader import get_model_loader

from hotbunk.rollout import errors
from hotbunk.rollout.arena import Arena
from hotbunk.rollout.backends.vllm.landing import (
    Landing,
    Slots,
    open_groups,
    placement_of,
    slices_of,
)
from hotbunk.rollout.backends.vllm.routes import Route, Routes
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    Digests,
    Placement,
    ReceiverLayout,
    Scope,
    TensorSpec,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import check_offer
from hotbunk.rollout.kernels import fingerprint
from hotbunk.rollout.memory import NativeArena
from hotbunk.rollout.uncut import in_thread

T = TypeVar("T")
Session = Callable[[], AbstractContextManager[object]]


class Weights:
    """One worker's part of the model, found by loading its checkpoint once more under watch.

    :param arena: where its parameters lie, for senders that write there themselves.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, arena: Arena | None = None) -> None:
        self.model = model
        self.arena = arena
        loader = get_model_loader(vllm_config.load_config)
        checkpoint = loader.get_all_weights(vllm_config.model_config, model)
        load: Any = model.load_weights
        contiguous = ((name, tensor.contiguous()) for name, tensor in checkpoint)
        self.routes = Routes(model, load, contiguous)
        self._known = {
            name: Placement(dtype_name(route.dtype), route.shape)
            for name, route in self.routes.items()
        }
        self._required = [frozenset(tie) for tie in self.routes.ties()]
        # Of the offer that came last: the next one is most often the same.
        self._offered: tuple[tuple[TensorSpec, ...], ReceiverLayout, Slots] | None = None

    def found(self) -> dict[str, Any]:
        """What this rank holds, as plain data."""
        return {
            "tensors": {
                name: (dtype_name(route.dtype), route.shape, route.elements)
                for name, route in self.routes.items()
            },
            "ties": self.routes.ties(),
            "transformed": self.routes.transformed(),
            "uncovered": self.routes.uncovered(self.model),
        }

    async def receive(
        self, transfer: Transfer, version: Version, scope: Scope, session: Session = nullcontext
    ) -> UpdateReport:
        """One update of this rank, from the check of the offer to the vote.

        :param session: entered before the first byte is written, left after the last was compared.
        :raises UpdateRefused: before the first byte; nothing changed.
        :raises UpdateFailed: after it.
        """
        manifest = transfer.manifest
        open_groups(manifest, scope)
        check_offer(manifest, self._known, self._required)
        layout, slots = await in_thread(lambda: self._places(manifest.tensors))
        arena = None
        places = layout.tensors.values()
        if all(place.offset >= 0 or not math.prod(place.shape) for place in places):
            arena = self._handle()
        return await landed(
            transfer, version, layout, lambda: Landing(manifest, self.routes, slots), arena, session
        )

    def _places(self, specs: tuple[TensorSpec, ...]) -> tuple[ReceiverLayout, Slots]:
        """Where what is offered goes. Parameters never move."""
        if self._offered is None or self._offered[0] != specs:
            layout = {
                name: placement_of(self.routes[name], self.arena)
                for spec in specs
                for name in spec.names
            }
            self._offered = (specs, ReceiverLayout(layout), Slots(specs, self.routes))
        return self._offered[1:]

    def digest(
        self, names: Collection[str] | None, others: Mapping[str, Route] | None = None
    ) -> Digests:
        """Fingerprints as the bytes lie here; of a part at its place in the whole.

        :param others: what lies here beside the base, by the name that digests give it.
        :raises UnknownNames: no such tensor.
        """
        known = {**self.routes, **(others or {})}
        unknown = set(names or ()) - known.keys()
        if unknown:
            raise errors.UnknownNames(unknown)
        values, slices = {}, {}
        for name in names if names is not None else known:
            route: Route = known[name]
            values[name] = fingerprint(route.read())
            if part := slices_of(route):
                slices[name] = part
        if names is None:
            for name, buffer in self.model.named_buffers():
                values[name] = fingerprint(buffer.detach().cpu().contiguous())
        return Digests(values, KIND, slices=slices)

    def _handle(self) -> ArenaHandle | None:
        fd = self.arena.fd if isinstance(self.arena, NativeArena) else None
        return (
            None if fd is None or self.arena is None else ArenaHandle("file", self.arena.size, fd)
        )


async def landed(
    transfer: Transfer,
    version: Version,
    layout: ReceiverLayout,
    begin: Callable[[], Landing],
    arena: ArenaHandle | None = None,
    session: Session = nullcontext,
) -> UpdateReport:
    """Accept, take what comes, compare it where it lies, vote.

    :param begin: asked where it goes when the first bytes have come, and not before.
    :raises UpdateRefused: before the first byte; nothing changed.
    :raises UpdateFailed: after it.
    """
    await transfer.accept(layout, arena)
    with session():
        landing: Landing | None = None

        async def first() -> None:
            nonlocal landing
            landing = await in_thread(begin)

        def write(bucket: Bucket) -> None:
            assert landing is not None, "begun before the first write"
            landing.write(bucket)

        await transfer.take(write, begin=first)
        if landing is None:  # an update without a byte is one, too
            landing = await in_thread(begin)
        applied = await in_thread(landing.finish)
        expected = dict(await transfer.fingerprints())
        wrong = await in_thread(partial(landing.differing, expected)) if expected else []
        if wrong:
            raise errors.VerifyFailed(wrong)
    await transfer.commit()
    return UpdateReport(
        version,
        applied=applied,
        nbytes=landing.intake.nbytes,
        buckets=landing.intake.buckets,
        verified="applied" if expected else "none",
    )
