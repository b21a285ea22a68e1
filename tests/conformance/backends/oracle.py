"""The oracle backend, as the suite sees it: it runs in virtual time, so a case costs microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.backends.oracle import OracleEngine, VirtualTimeLoop, create
from hotbunk.rollout.backends.oracle.model import (
    DRAFT,
    GROUPS,
    parameters_of,
    state_of,
    weights_at,
)
from hotbunk.rollout.backends.oracle.tokens import continuation, digest_of, weights_bits
from hotbunk.rollout.contract import ADAPTER_PREFIX, TARGET, Tag, Version


class OracleUnderTest(BackendUnderTest):
    """Options go to :func:`hotbunk.rollout.backends.oracle.create`."""

    name = "oracle"
    prompts = (
        (11, 12, 13, 14, 15, 16, 17, 18, 19),
        (21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32),
        (41, 42, 43, 44, 45, 46, 47, 48, 49, 50),
    )
    bucket_sizes = (1 << 12, 64, 7, 1)
    loop_factory = VirtualTimeLoop
    simulated = True

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.engine: OracleEngine
        self.expected_not_run: dict[str, str] = {}
        if options.get("gate", "proxy") == "proxy":
            self.expected_not_run["the_engine_itself_refuses"] = (
                "it makes tokens of whatever memory holds, so that a broken rule shows"
            )
        if set(options.get("fed", GROUPS)) == set(GROUPS):
            self.expected_not_run["groups_that_take_no_update"] = "every group takes updates"

    async def start(self) -> OracleEngine:
        self.engine = create(**self.options)
        return self.engine

    def weights(self, version: int) -> Tensors:
        return weights_at(version, self.options.get("fed", GROUPS))

    def golden(self, prompt: Sequence[int], version: int, n: int) -> list[int]:
        return continuation(prompt, self._bits(version), Version(0, version), n)

    def read_weight(self, name: str) -> bytes:
        for group in self.engine.groups.values():
            if name in group.names():
                return group.read(name)
        raise KeyError(name)

    def resident(self, tag: Tag) -> int:
        return self.engine.device.resident(tag)

    def host_backup(self) -> int:
        return self.engine.device.host_used

    def corrupt_weight(self, name: str) -> bool:
        for group in self.engine.groups.values():
            if name in group.owner:
                group.write(name, 0, bytes([group.read(name)[0] ^ 1]))
                return True
        raise KeyError(name)

    def sabotage(self, point: str, how: str) -> bool:
        inside = {"release": "release/unmap", "resume": "resume/restore"}
        at, faults = inside.get(point, f"update/{point}"), self.engine.faults
        if how == "hang":
            faults.hangs(at)
        else:
            faults.raises(at, RuntimeError(f"{point} breaks"))
        return True

    def starve(self, tag: Tag) -> bool:
        self.engine.device.refuse.add(tag.value)
        return True

    async def kill(self) -> bool:
        self.engine.faults.kill()
        return True

    def adapter(self, name: str, version: int) -> Tensors:
        return weights_at(version, [ADAPTER_PREFIX + name])

    def adapter_golden(
        self, prompt: Sequence[int], version: int, name: str, adapter_version: int, n: int
    ) -> list[int]:
        group = ADAPTER_PREFIX + name
        bits = self._bits(version, self._digest(group, adapter_version))
        return continuation(prompt, bits, Version(0, version), n)

    def delta(self, base: int, version: int) -> Tensors:
        """The bits that change."""
        return [
            (spec, bytes(old ^ new for old, new in zip(before, after, strict=True)))
            for (spec, before), (_, after) in zip(
                self.weights(base), self.weights(version), strict=True
            )
        ]

    def _bits(self, version: int, *adapters: int) -> int:
        fed = self.options.get("fed", GROUPS)
        base = [self._digest(g, version if g in fed else 0) for g in (TARGET, DRAFT)]
        return weights_bits([*base, *adapters])

    @staticmethod
    def _digest(group: str, version: int) -> int:
        sent = {spec.name: content for spec, content in weights_at(version, [group])}
        assert len(sent) == len(parameters_of(group))
        return digest_of(state_of(group, sent))
