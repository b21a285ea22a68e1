"""``hotbunk conformance``: the suite against a backend, as a table and as ``matrix.json``."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from hotbunk import __version__
from hotbunk.conformance.backends import under_test
from hotbunk.conformance.case import CaseResult, Level, Status, all_cases
from hotbunk.conformance.runner import run as run_cases
from hotbunk.conformance.runner import write_matrix
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import ConfigError, closest

_STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.UNSUPPORTED: "cyan",
    Status.NOT_RUN: "dim",
    Status.ERROR: "bold magenta",
}


def run(backend: str, *, level: str, settings: Sequence[str], seed: int, out: Path) -> None:
    """See :func:`hotbunk.cli.conformance`.

    :raises UsageError: what was asked for cannot be meant; nothing ran.
    """
    if level not in list(Level):
        known = [one.value for one in Level]
        raise ConfigError(f"no level {level!r}{closest(level, known)}", remedy=f"there are {known}")
    # transformers draws one while it saves a model of a few kilobytes.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    described = under_test(backend, **parse_settings(settings))
    _try_options(described)
    cases = all_cases(Level(level))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(backend, total=len(cases))
        results = run_cases(
            described, Level(level), seed, tell=lambda result: progress.advance(task)
        )
    path = write_matrix(
        results, out, backend=backend, level=level, seed=str(seed), hotbunk=__version__
    )
    console = Console()
    console.print(_table(backend, results))
    for line in _details(results):
        console.print(line)
    console.print(_summary(results), highlight=False)
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if any(result.status in (Status.FAIL, Status.ERROR) for result in results):
        raise typer.Exit(1)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` into options; values are YAML, so numbers, booleans and lists mean themselves.

    :raises ConfigError: no ``=``, a key given twice, or a value that is not YAML.
    """
    options: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--set {text!r} is not key=value")
        if key in options:
            raise ConfigError(f"--set {key}= was given more than once")
        try:
            options[key] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--set {key}={value}: {error}") from error
    return options


def _try_options(described: BackendUnderTest) -> None:
    """Build an engine (without starting it), so that a bad option is said once, not in each case.

    :raises ConfigError: a bad option.
    """
    with asyncio.Runner(loop_factory=described.loop_factory) as runner:
        runner.run(described.start())


def _table(backend: str, results: Sequence[CaseResult]) -> Table:
    table = Table(title=f"conformance of {backend}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for result in results:
        status = Text(result.status.value, _STYLES[result.status])
        table.add_row(result.case, status, f"{result.seconds:.2f}")
    return table


def _details(results: Sequence[CaseResult]) -> Iterator[Text]:
    """Why cases failed, or were not run."""
    for result in results:
        if result.detail:
            style = _STYLES[result.status]
            yield Text.assemble((result.status.value, style), f" {result.case}: {result.detail}")


def _summary(results: Sequence[CaseResult]) -> Text:
    counts = Counter(result.status for result in results)
    shown = [(f"{counts[s]} {s.value}", _STYLES[s]) for s in Status if counts[s]]
    return Text(", ").join(Text(text, style) for text, style in shown)
