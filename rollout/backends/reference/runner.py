"""The model on the device: weights and KV in a pool's arenas, one forward pass a step.

Everything here runs on the engine's own thread, between or in steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from hotbunk.rollout import errors
from hotbunk.rollout.arena import Survival
from hotbunk.rollout.backends.reference.attention import StepContext
from hotbunk.rollout.backends.reference.lora import AdapterBank
from hotbunk.rollout.backends.reference.options import ReferenceOptions
from hotbunk.rollout.backends.reference.quantize import quantise_model, quantised
from hotbunk.rollout.backends.reference.sampler import Drawn, draw
from hotbunk.rollout.backends.reference.scheduler import Plan, Sequence
from hotbunk.rollout.backends.reference.weights import build_model, load_weights
from hotbunk.rollout.binding import ModuleBinding, dtype_from, tensor_over
from hotbunk.rollout.contract import TARGET, ArenaHandle, Tag
from hotbunk.rollout.device_pool import device_pool
from hotbunk.rollout.kernels import as_bytes, fingerprints, kv_gather, kv_scatter, kv_zero
from hotbunk.rollout.memory import NativeArena


class ModelRunner:
    """Loads a model into the pool and computes steps."""

    def __init__(self, options: ReferenceOptions) -> None:
        self._saved_kv_dir = options.backup_dir or tempfile.gettempdir()
        self.pool = device_pool(options.device, options.backup_dir, share=options.share_weights)
        self._shares, self._device = options.share_weights, options.device
        self.device = torch.device(self.pool.device)
        self._block_size = options.block_size
        self.blocks = options.kv_cache_tokens // options.block_size
        # What is quantised on its way is read first; else the arena is the weights' first place.
        changed = options.quantization is not None
        self.model = build_model(options, whole=changed)
        self.config: Any = self.model.config
        self.max_context = int(self.config.max_position_embeddings)
        dtype = self.dtype = dtype_from(options.dtype)
        if options.quantization == "int8":
            quantise_model(self.model)
        self.quantised = quantised(self.model)
        self.binding = ModuleBinding(self.model, self.pool, Tag.WEIGHTS, TARGET)
        if options.load == "disk" and not changed:
            load_weights(options, self.binding)
        self.adapters = AdapterBank(self.model, self.pool, dtype)
        self._kv = self._make_kv(dtype)

    @contextlib.contextmanager
    def shared_weights(self) -> Iterator[ArenaHandle | None]:
        """The weights' arena, for a peer that may write to it; None where it is not shared.

        A handle of a device's memory is closed at the end: the peer has one of its own by then.
        """
        arena = self.binding.arena
        # What is sent to a quantised target is not what lies there.
        if not self._shares or self.quantised or not isinstance(arena, NativeArena):
            yield None
        elif arena.fd is not None:
            yield ArenaHandle("file", arena.size, arena.fd)
        else:
            shared, kind = arena.export(), self._device.partition(":")[0]
            number = int(shared.number).to_bytes(8, "little")
            try:
                yield ArenaHandle(kind, int(shared.nbytes), int(shared.fd), number)
            finally:
                if shared.fd >= 0:
                    os.close(shared.fd)

    def _make_kv(self, dtype: torch.dtype) -> torch.Tensor:
        config = self.config
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, self.blocks * self._block_size, heads, dim)
        nbytes = dtype.itemsize * math.prod(shape)
        self._kv_arena = self.pool.arena(Tag.KV_CACHE, nbytes)
        # Never read undefined after a wake.
        region = self._kv_arena.add("kv", nbytes, Survival.ZERO)
        return tensor_over(self.pool, self._kv_arena, region, dtype).view(shape)

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[Drawn | None]:
        """Compute a plan; one result a chunk, None where the prompt is not through yet."""
        chunks = plan.chunks
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        ends: list[int] = []
        rows: dict[str, list[int]] = {}
        at = 0
        for chunk in chunks:
            if chunk.sequence.request.adapter is not None:
                mine = rows.setdefault(chunk.sequence.request.adapter, [])
                mine.extend(range(at, at + chunk.count))
            at += chunk.count
            if chunk.samples:
                ends.append(at - 1)
        self.adapters.use(rows)
        hidden = self.model.model(
            input_ids=torch.tensor([ids]).to(self.device),
            position_ids=torch.tensor([positions]).to(self.device),
            use_cache=False,
            hotbunk_step=StepContext.of(plan, self._kv, self._block_size),
        ).last_hidden_state
        if not ends:
            return [None] * len(chunks)
        self.adapters.use({})  # the head works on other rows, and no adapter adds to it
        # Drawn on the host: the same tokens whatever the device, and they are wanted here.
        last = hidden[0].index_select(0, torch.tensor(ends).to(self.device))
        logits = self.model.lm_head(last).float().cpu()
        results = iter(draw(logits, [c.sequence for c in chunks if c.samples]))
        return [next(results) if c.samples else None for c in chunks]

    def save_kv(self, sequences: Iterable[Sequence]) -> KVStash:
        """Copy the KV blocks of these sequences to the host.

        :raises HostOutOfMemory: there is no room for it.
        """
        stash = KVStash(self._saved_kv_dir, {s for s in sequences if s.computed})
        for _, blocks in stash.groups():
            size = self._block_size
            stash.save(kv_gather(self._kv, blocks, size, len(blocks) * size))
        return stash

    def restore_kv(self, stash: KVStash) -> None:
        """Copy it back to where it was. :raises MemoryFault, OSError: it cannot be read."""
        layers, planes, _, *row = self._kv.shape
        for first, blocks in stash.groups():
            shape = (layers, planes, len(blocks) * self._block_size, *row)
            saved = stash.load(first, len(blocks), shape, self._kv.dtype)
            kv_scatter(self._kv, blocks, self._block_size, saved.to(self.device))

    def zero_kv(self, blocks: list[int]) -> None:
        """Leave nothing in these blocks. Memory that is released has nothing left anyway."""
        if not self._kv_arena.released:
            kv_zero(self._kv, blocks, self._block_size)

    def digest(self, names: Collection[str] | None) -> dict[str, int]:
        """Fingerprints of all state, or of ``names``."""
        known = {**self.binding.state, **self.binding.parameters, **self.adapters.tensors()}
        chosen = known if names is None else names
        unknown = set(chosen) - known.keys()
        if unknown:
            raise errors.UnknownNames(unknown)
        found = fingerprints([(known[name], 0) for name in chosen])
        return dict(zip(chosen, found, strict=True))

    def close(self) -> None:
        """Let go of the model, then of its memory."""
        del self.model, self.binding, self.adapters, self._kv
        self.pool.close()


_TOGETHER = 64  # blocks that are saved and read at a time


class KVStash:
    """KV blocks of the sequences ``held``, each once, in an unlinked file on the host.

    :raises HostOutOfMemory: no file can be made there.
    """

    def __init__(self, directory: str, held: set[Sequence]) -> None:
        self.held = held
        self.blocks = sorted({block for sequence in held for block in sequence.blocks})
        self.nbytes = 0
        try:
            # Lives as long as the stash; it has no name, so nothing outlives the process.
            self._file = tempfile.TemporaryFile(dir=directory, prefix="hotbunk-")  # noqa: SIM115
        except OSError as error:
            raise errors.HostOutOfMemory(0, 0, where=str(error)) from error

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """The blocks, a few at a time, with the place of each group's first."""
        for first in range(0, len(self.blocks), _TOGETHER):
            yield first, self.blocks[first : first + _TOGETHER]

    def save(self, rows: torch.Tensor) -> None:
        """Append the next group. :raises HostOutOfMemory: no room; the stash is closed."""
        data = as_bytes(rows.cpu()).numpy().data
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.close()
            raise errors.HostOutOfMemory(data.nbytes, 0, where=str(error)) from error
        self.nbytes += data.nbytes

    def load(
        self, first: int, count: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Read a group of ``count`` blocks, the first at that place among ``blocks``.

        :raises MemoryFault: it is not all there.
        """
        wanted = math.prod(shape) * dtype.itemsize
        self._file.seek(first * (wanted // count))
        data = bytearray(self._file.read(wanted))
        if len(data) != wanted:
            raise errors.MemoryFault("saved KV is cut short")
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def close(self) -> None:
        """Forget it."""
        with contextlib.suppress(OSError):  # a full disk is told once, by save
            self._file.close()
