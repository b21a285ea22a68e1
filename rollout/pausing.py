"""Pauses as callers ask for them: owned, escalating, and choosy about what they keep."""

from __future__ import annotations

import time

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.contract import Engine, PauseMode, PauseReport, Version
from hotbunk.rollout.gate import Gate, Stage
from hotbunk.rollout.line import EngineLine
from hotbunk.rollout.one_verb import OneVerb
from hotbunk.rollout.quiesce import EnginePauses
from hotbunk.rollout.serving import Serving


class Pausing:
    """The gate shut and the engine brought to stand still, for an owner."""

    def __init__(
        self,
        backend: Engine,
        line: EngineLine,
        gate: Gate,
        pauses: EnginePauses,
        exclusive: OneVerb,
        serving: Serving,
    ) -> None:
        self._backend = backend
        self._line = line
        self._gate = gate
        self._pauses = pauses
        self._exclusive = exclusive
        self._serving = serving

    async def pause(
        self,
        mode: PauseMode,
        *,
        clear_cache: bool,
        reject: bool,
        owner: str,
        deadline: float | None,
        min_start_version: Version | None,
    ) -> PauseReport:
        """As :meth:`Replica.pause_generation`."""
        self._check(mode, min_start_version)
        self._gate.hold(owner, mode, clear_cache, reject)
        began = time.perf_counter()
        older: tuple[str, ...] = ()
        with self._line.located():
            if min_start_version is not None:
                older = await self._serving.end_older(min_start_version)
            drains = mode is not PauseMode.WAIT or await self._pauses.may_drain(
                self._exclusive.lock, deadline
            )
        # What is frozen over missing content stays frozen: it cannot be let finish.
        how = mode if drains else PauseMode.KEEP
        report = None
        if owner in self._gate.pauses:
            with self._line.located():
                report = await self._pauses.pause("pause", how, clear_cache, deadline)
        if report is None or owner not in self._gate.pauses:
            await self._pauses.reopen()
            raise errors.SessionError(
                f"{owner} resumed generation before its pause was complete", where=self._line.name
            )
        return msgspec.structs.replace(
            report,
            aborted=tuple(dict.fromkeys((*older, *report.aborted))),
            held=self._gate.ids(Stage.HELD),
            seconds=time.perf_counter() - began,
        )

    def _check(self, mode: PauseMode, min_start_version: Version | None) -> None:
        caps = self._backend.capabilities
        ability = caps.pause.get(mode)
        if ability is None or not ability:
            hint = "" if ability is None else ability.how
            raise errors.Unsupported(f"pause mode {mode.value!r}", caps.backend, hint)
        if min_start_version is not None:
            if mode is PauseMode.ABORT:
                raise errors.UsageError(
                    "min_start_version says what a pause keeps, and mode 'abort' keeps nothing",
                    where=self._line.name,
                    remedy="use mode keep or wait",
                )
            self._line.require("abort")
        self._line.check_alive()
