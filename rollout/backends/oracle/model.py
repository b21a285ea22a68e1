"""A model of a few hundred real bytes, with everything that models hide from a weight sync.

Three groups: ``target`` has tied embeddings, three parameters that lie side by side under a fused
alias, a scalar, an empty tensor, odd sizes, mixed types, a persistent and a non-persistent buffer,
and an attribute that post-load processing derives from the parameters. ``draft`` and ``encoder``
are smaller. A group's content lies in one arena whose address never changes.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hotbunk.rollout.backends.oracle.tokens import digest_of
from hotbunk.rollout.contract import ADAPTER_PREFIX, ITEMSIZE, TARGET, TensorSpec, Version

DRAFT = "draft"
ENCODER = "encoder"
GROUPS = (TARGET, DRAFT, ENCODER)
GARBAGE = 0xA5  # what memory holds that was mapped and not written


class Parameter(NamedTuple):
    """A parameter: what an update carries. ``tied`` are further names of the same bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of its contiguous form."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name its bytes are bound to."""
        return (self.name, *self.tied)


PARAMETERS: Mapping[str, tuple[Parameter, ...]] = {
    TARGET: (
        Parameter("embed.weight", "float32", (4, 2), tied=("lm_head.weight",)),
        Parameter("layers.0.q.weight", "bfloat16", (2, 3)),
        Parameter("layers.0.k.weight", "bfloat16", (1, 3)),
        Parameter("layers.0.v.weight", "bfloat16", (1, 3)),
        Parameter("layers.0.mlp.weight", "float16", (3, 3)),
        Parameter("layers.0.gate", "float32", ()),
        Parameter("layers.0.bias", "float32", (0, 4)),
        Parameter("layers.0.codes", "int8", (5,)),
    ),
    DRAFT: (
        Parameter("draft.fc.weight", "float32", (2, 2)),
        Parameter("draft.head.weight", "bfloat16", (3,)),
    ),
    ENCODER: (
        Parameter("encoder.patch.weight", "float32", (3,)),
        Parameter("encoder.norm.weight", "float16", (1,)),
    ),
}

# State that no update carries and that must survive every cycle. The first is non-persistent (in
# no checkpoint), the second persistent.
BUFFERS: Mapping[str, Mapping[str, bytes]] = {
    TARGET: {
        "rotary.inv_freq": bytes(range(1, 9)),
        "layers.0.mlp.running_mean": bytes(range(16, 20)),
    },
    DRAFT: {"draft.rotary.inv_freq": bytes(range(32, 36))},
    ENCODER: {},
}

# Views: name -> the parameters they span, which lie side by side.
ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    TARGET: {
        "layers.0.qkv": ("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"),
        "lm_head.view": ("embed.weight",),
    },
}

DERIVED = "post_load"  # name of the derived attribute, after the group's name and a dot


def adapter_parameters(name: str) -> tuple[Parameter, ...]:
    """What the adapter ``name`` is made of; its tensors carry its name, so two never collide."""
    return (
        Parameter(f"{name}.layers.0.q.lora_a", "float32", (2,)),
        Parameter(f"{name}.layers.0.q.lora_b", "float32", (1, 2)),
    )


def parameters_of(group: str) -> tuple[Parameter, ...]:
    """The parameters of a group, adapters included."""
    if group.startswith(ADAPTER_PREFIX):
        return adapter_parameters(group.removeprefix(ADAPTER_PREFIX))
    return PARAMETERS[group]


def content(name: str, step: int, nbytes: int) -> bytes:
    """The bytes of parameter ``name`` at training step ``step``: different for every one."""
    return hashlib.shake_128(f"{name}@{step}".encode()).digest(nbytes)


def weights_at(step: int, groups: Iterable[str] = GROUPS) -> list[tuple[TensorSpec, bytes]]:
    """A trainer's weights at ``step``: every parameter of ``groups``, tied ones once."""
    return [
        (
            TensorSpec(p.name, p.shape, p.dtype, p.nbytes, group=group, aliases=p.tied),
            content(p.name, step, p.nbytes),
        )
        for group in groups
        for p in parameters_of(group)
    ]


def derived(parameters: Mapping[str, bytes]) -> bytes:
    """What post-load processing derives from the parameters of a group (tied names once)."""
    total = sum(zlib.crc32(data, zlib.crc32(name.encode())) for name, data in parameters.items())
    return (total & 0xFFFFFFFF).to_bytes(4, "little")


def state_of(group: str, parameters: Mapping[str, bytes]) -> dict[str, bytes]:
    """All state of a healthy group with these parameters, computed without an engine."""
    state = dict(parameters)
    for p in parameters_of(group):
        state.update(dict.fromkeys(p.tied, parameters[p.name]))
    state.update(BUFFERS.get(group, {}))
    for alias, spanned in ALIASES.get(group, {}).items():
        state[alias] = b"".join(parameters[name] for name in spanned)
    state[f"{group}.{DERIVED}"] = derived(parameters)
    return state


class Unmapped(RuntimeError):
    """Memory was touched that is not mapped: on a real device, an illegal access."""


class WeightGroup:
    """One group's state in an arena of fixed address; parameters first, then buffers."""

    def __init__(self, name: str, step: int | None) -> None:
        self.name = name
        self.parameters = {p.name: p for p in parameters_of(name)}
        self.owner = {alias: p.name for p in self.parameters.values() for alias in p.names}
        self.mapped = True
        self.loaded = step is not None  # the content is whole
        self.dirty = False  # an update began and did not commit
        self.version: Version | None = None if step is None else Version(0, step)
        self.backup: bytes | None = None
        self.derived = bytes(4)  # an attribute of the module, not in the arena
        self._kept: dict[str, bytes] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        sizes = {p.name: p.nbytes for p in self.parameters.values()}
        sizes |= {n: len(data) for n, data in BUFFERS.get(name, {}).items()}
        end = 0
        for item, nbytes in sizes.items():
            self._spans[item] = (end, end + nbytes)
            end += nbytes
        self.arena = bytearray([GARBAGE]) * end
        self._views = {}  # made once: they follow the arena through every cycle
        for alias, spanned in ALIASES.get(name, {}).items():
            first, last = self._spans[spanned[0]][0], self._spans[spanned[-1]][1]
            self._views[alias] = memoryview(self.arena)[first:last]
        for item, data in BUFFERS.get(name, {}).items():
            self.write(item, 0, data)
        if step is not None:
            for p in self.parameters.values():
                self.write(p.name, 0, content(p.name, step, p.nbytes))
            self.post_load()

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return len(self.arena)

    def read(self, name: str) -> bytes:
        """The bytes of a parameter (by any of its names), buffer, alias or attribute."""
        if not self.mapped:
            raise Unmapped(f"{name} of group {self.name} was read while its memory is released")
        if name in self._views:
            return bytes(self._views[name])
        if name == f"{self.name}.{DERIVED}":
            return self.derived
        start, end = self._spans[self.owner.get(name, name)]
        return bytes(self.arena[start:end])

    def write(self, name: str, start: int, data: bytes | memoryview) -> None:
        """Overwrite bytes of one item, from byte ``start`` of it on."""
        if not self.mapped:
            raise Unmapped(f"{name} of group {self.name} was written while its memory is released")
        at = self._spans[self.owner.get(name, name)][0] + start
        self.arena[at : at + len(data)] = data

    def names(self) -> list[str]:
        """Every name there is in the group."""
        return [*self.owner, *BUFFERS.get(self.name, {}), *self._views, f"{self.name}.{DERIVED}"]

    def digest(self) -> int:
        """A digest of all state, as it lies in memory now."""
        return digest_of({name: self.read(name) for name in self.names()})

    def pre_load(self) -> None:
        """Undo what post-load processing did: it runs once before the first byte of an update."""
        self.derived = bytes(4)

    def post_load(self) -> None:
        """Derive what depends on the parameters. One-way: twice in a row gives another result."""
        fresh = derived({name: self.read(name) for name in self.parameters})
        total = int.from_bytes(self.derived, "little") + int.from_bytes(fresh, "little")
        self.derived = (total & 0xFFFFFFFF).to_bytes(4, "little")

    def unmap(self, *, keep_content: bool) -> None:
        """The memory goes: what was in it is gone, but for the backup and the buffers."""
        self.backup = bytes(self.arena) if keep_content else None
        self._kept = {name: self.read(name) for name in BUFFERS.get(self.name, {})}
        self.arena[:] = bytes(len(self.arena))
        self.mapped = self.dirty = False
        self.loaded = self.loaded and keep_content
        if not self.loaded:
            self.version = None

    def forget_backup(self) -> None:
        """What was kept of released content is dropped."""
        if not self.mapped:
            self.backup, self.loaded, self.version = None, False, None

    def flip_a_bit(self) -> None:
        """Corrupt the first parameter."""
        self.arena[0] ^= 1

    def map(self) -> None:
        """The memory is back: with its backup, or with garbage and the buffers."""
        self.mapped = True
        self.arena[:] = self.backup or bytes([GARBAGE]) * len(self.arena)
        self.backup = None
        for name, data in self._kept.items():
            self.write(name, 0, data)
