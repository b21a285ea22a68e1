"""One walk of a source for all receivers: each tensor is looked at once and packed for everyone.

The walk has a thread of its own. It waits there for receivers, never for the event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.streams import (
    Batch,
    Held,
    Identity,
    Plans,
    Stream,
    Taker,
)
from hotbunk.rollout.binding import dtype_from, dtype_name
from hotbunk.rollout.contract import BucketEntry, TensorSpec
from hotbunk.rollout.errors import DeadlineExceeded, ShapeMismatch, TransferFailed
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.kernels import CopyPlan, fingerprints, native_kernels
from hotbunk.rollout.native_kernels import beside

_LOOK = 1.0  # seconds; how often a waiting walk looks at the clock


class Stopped(Exception):
    """The walk is not wanted any more."""


OnFull = Callable[[Stream, int, int, tuple[BucketEntry, ...]], None]


class Walk:
    """Packs one walk of a source into streams.

    :param on_full: called in the walk's thread with a stream, a bucket's number, its used bytes and
        its table, when it is complete.
    :param plans: one for each stream.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        streams: Sequence[Stream],
        plans: Sequence[Plans],
        on_full: OnFull,
        *,
        fingerprints: bool,
        deadline: float,
    ) -> None:
        self._specs = specs
        self._changed = threading.Condition()
        self._stopped = False
        # Held while bytes are written: who leaves waits for it, and then nobody writes to them.
        self._writing = threading.Lock()
        self._deadline = deadline
        self._until = time.monotonic() + deadline
        self._lanes = [
            _Lane(self, stream, one, on_full, fingerprints)
            for stream, one in zip(streams, plans, strict=True)
        ]

    # -- from the event loop ------------------------------------------------------------------

    def grant(self, taker: Taker, granted: int) -> None:
        """The taker takes buckets below this number."""
        with self._changed:
            taker.granted = max(taker.granted, granted)
            self._changed.notify_all()

    def leave(self, taker: Taker) -> None:
        """Do not wait for the taker any more, and begin no more writes to its arena."""
        with self._changed:
            taker.gone = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End at the next piece."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def forget(self) -> None:
        """After the walk: let go of all memory, whoever still holds this object."""
        for lane in self._lanes:
            lane.forget()

    def quiet(self, seconds: float) -> bool:
        """Wait, in a thread, until nothing is written to takers that left before."""
        if not self._writing.acquire(timeout=seconds):
            return False
        self._writing.release()
        return True

    def fingerprints(self, stream: Stream) -> dict[str, int]:
        """After the walk: of each tensor as the stream's takers got it."""
        return next(lane.sums for lane in self._lanes if lane.stream is stream)

    # -- in a thread --------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, source: WeightSource) -> None:
        """Pack everything.

        :raises Stopped: nobody wants it any more.
        :raises ShapeMismatch: a tensor is not what its spec said.
        :raises TransferFailed: the source yields fewer tensors than it said, or more.
        :raises DeadlineExceeded: receivers did not take it in time.
        """
        tensors = source.tensors()
        for index, spec in enumerate(self._specs):
            self._check()
            tensor = next(tensors, None)
            if tensor is None:
                raise TransferFailed(f"the source ended before {spec.name!r}")
            if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
                raise ShapeMismatch(
                    spec.name,
                    f"{spec.dtype}{list(spec.shape)} in the offer",
                    f"{dtype_name(tensor.dtype)}{list(tensor.shape)}",
                )
            for lane in self._lanes:
                lane.take(index, tensor.detach())
            del tensor  # before the source gathers the next one
        if next(tensors, None) is not None:
            raise TransferFailed(f"the source has more than the {len(self._specs)} tensors it said")
        for lane in self._lanes:
            lane.finish()

    def wait_for(self, stream: Stream, number: int) -> bool:
        """Until every taker takes that bucket; False: none is left."""
        with self._changed:
            while True:
                self._check()
                takers = [m for m in stream.takers if not m.gone]
                if all(m.granted > number for m in takers):
                    return bool(takers)
                if time.monotonic() > self._until:
                    raise DeadlineExceeded(f"taking bucket {number}", self._deadline)
                self._changed.wait(_LOOK)

    def _check(self) -> None:
        if self._stopped or not any(lane.stream.alive() for lane in self._lanes):
            raise Stopped

    def write(self, batch: Callable[[], None]) -> None:
        """Run copies, so that who leaves can tell when the last one has ended."""
        with self._writing:
            batch()


class _Lane:
    """One stream's place in the walk."""

    def __init__(
        self, walk: Walk, stream: Stream, plans: Plans, on_full: OnFull, with_sums: bool
    ) -> None:
        self.stream = stream
        self.sums: dict[str, int] = {}
        self._walk = walk
        self._plans = plans
        self._on_full = on_full
        self._with_sums = with_sums
        self._specs = walk._specs
        self._due = self._in_order()
        self._piece = next(self._due, None)
        self._position = {one.spec: position for position, one in enumerate(stream.want)}
        self._number = -1  # of the bucket being filled
        self._used = 0
        self._held: list[Held] = []
        self._held_bytes = 0
        self._batches = 0
        self._flat: tuple[int, torch.Tensor] | None = None
        self._key = stream.key
        self._live = True
        plans.use((self._key, with_sums))
        if with_sums:
            self.sums = {self._specs[one.spec].name: 0 for one in stream.want}

    def _in_order(self) -> Iterator[tuple[int, BucketEntry]]:
        for number, table in enumerate(self.stream.table):
            for entry in table:
                yield number, entry

    def take(self, index: int, tensor: torch.Tensor) -> None:
        """Pack the pieces of a tensor, as far as there are any."""
        position = self._position.get(index)
        if position is None:
            return
        nbytes = tensor.nbytes
        if self._held and self._held_bytes + nbytes > self.stream.batch:
            self._copy()  # live bytes: one batch, and one tensor
        while self._live and self._piece is not None and self._piece[1].index == index:
            number, entry = self._piece
            if number != self._number:
                self._full()
                self._live = self._walk.wait_for(self.stream, number)
                self._number, self._used = number, 0
                if not self._live:
                    break
            self._held.append(Held(position, entry, tensor))
            self._used = entry.offset + entry.nbytes
            self._piece = next(self._due, None)
        self._held_bytes += nbytes
        if self._held_bytes > self.stream.batch:
            self._copy()

    def forget(self) -> None:
        self._held, self._flat = [], None
        self.stream.halves = []
        for taker in self.stream.takers:
            taker.target = None

    def finish(self) -> None:
        if self._live:
            self._full()

    def _full(self) -> None:
        self._copy()
        if self._number >= 0:
            self._on_full(self.stream, self._number, self._used, self.stream.table[self._number])

    def _copy(self) -> None:
        """Do what is to be copied, and let go of the source's tensors."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            # Where there are halves somebody reads from the other one.
            with beside() if self.stream.halves else nullcontext():
                self._walk.write(lambda: self._write(held))
        if self._piece is None or self._flat is None or self._flat[0] != self._piece[1].index:
            self._flat = None  # only a tensor that goes on is looked at again

    def _write(self, held: list[Held]) -> None:
        number, self._batches = self._batches, self._batches + 1
        if self.stream.key != self._key:  # somebody left
            self._key = self.stream.key
            self._plans.use((self._key, self._with_sums))
        batch = self._plans.find(number, held)
        if batch is None:
            found = self._write_anew(number, held)
        else:
            batch.plan.run()
            kernels = native_kernels()
            assert kernels is not None, "a plan without tensors is native"
            found = kernels.fingerprints(batch.sums) if batch.sums else []
        if self._with_sums:
            for piece, one in zip(held, found, strict=True):
                name = self._specs[piece.entry.index].name
                self.sums[name] = (self.sums[name] + one) & MASK

    def _write_anew(self, number: int, held: list[Held]) -> list[int]:
        """Compile, run, and keep what can be run again by address; the pieces' fingerprints."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        sums: list[tuple[torch.Tensor, int]] = []
        stays = native_kernels() is not None
        for position, entry, tensor in held:
            want = self.stream.want[position]
            flat = self._flattened(want, tensor)
            dtype = dtype_from(want.dtype)
            end = (entry.start + entry.nbytes) // dtype.itemsize
            source = flat[entry.start // dtype.itemsize : end]
            own = flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            stays = stays and own and source.is_cpu
            targets = list(self.stream.targets(self._number, position, entry))
            pairs += [(target.view(dtype), source) for target in targets]
            if self._with_sums:
                # The source may still be in the cache; what was written is not.
                same = source.dtype is dtype and source.is_cpu
                sums.append((source if same else targets[0], entry.start))
        plan = CopyPlan(pairs, cached=self.stream.cached)
        plan.run()
        found = fingerprints(sums)
        self._plans.compiled += 1
        if stays and plan.let_go():
            identities = [Identity.of(piece.tensor) for piece in held]
            lie = [(seen.data_ptr(), seen.nbytes, start) for seen, start in sums]
            self._plans.keep(number, Batch(identities, plan, lie))
        return found

    def _flattened(self, want: Want, tensor: torch.Tensor) -> torch.Tensor:
        """The wanted elements in order: the tensor's own memory where they lie so."""
        if self._flat is None or self._flat[0] != want.spec:
            part = tensor.resolve_conj().resolve_neg()
            for dim, (start, length) in enumerate(want.slices):
                part = part.narrow(dim, start, length)
            self._flat = (want.spec, part.reshape(-1))
        return self._flat[1]
