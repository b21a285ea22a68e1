"""``hotbunk conformance`` and ``python -m hotbunk.conformance``. Imports what it needs when it runs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hotbunk.rollout.errors import UsageError

if TYPE_CHECKING:
    from hotbunk.conformance.under_test import BackendUnderTest

URL_BACKEND = "url"  # whatever already runs there


def conformance(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[compare A B]", help="What changed between two runs' --out."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Its name: oracle, reference, vllm, or what a package brings."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write matrix.json (or mutants.json) into.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="smoke, core, colocate, sync, fault, or all of them.")
    ] = "all",
    model: Annotated[
        Path | None, typer.Option(help="A model directory to try it with; default: a tiny one.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A server that already runs.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="An option of the backend; may be repeated."
        ),
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME", help="Only this one; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what the cases draw.")] = 0,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="The same as compare A B.")
    ] = None,
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Try the suite itself: does it notice what is broken?"),
    ] = False,
) -> None:
    """Prove what a backend claims: run the conformance suite against it.

    Prints a table and writes OUT/matrix.json and report.html, among others. 0: nothing failed; what the backend declares
    unsupported was refused, and changed nothing; what was not run, it said beforehand. 1: a case
    failed, or the suite itself did. With --mutants: 0 if every broken engine was found out. With compare: 1
    if something is worse in B.
    """
    from hotbunk.rollout.options import parse_settings

    pair = _pair(words or [], compare)
    if pair is not None:
        from hotbunk.conformance.compare import show

        sys.exit(show(*pair))
    if mutants:
        from hotbunk.conformance.mutants.show import run_all

        sys.exit(run_all(out))
    options: dict[str, Any] = parse_settings(settings or [])
    if url is not None:
        backend, options = backend or URL_BACKEND, {"url": url, **options}
    if model is not None:
        options = {"model": str(model), **options}
    if backend is None:
        raise UsageError("which backend?", remedy="--backend NAME, --url URL, or --mutants")
    sys.exit(_run(_Run(backend, options, level, tuple(cases or ()), seed), out))


class _Run(NamedTuple):
    """What was asked for."""

    backend: str
    options: dict[str, Any]
    level: str
    cases: tuple[str, ...]
    seed: int

    @property
    def command(self) -> str:
        """That asks for it again, without its level and cases."""
        sets = [f"--set {shlex.quote(f'{key}={value}')}" for key, value in self.options.items()]
        return " ".join(
            ["hotbunk conformance --backend", self.backend, *sets, f"--seed {self.seed}"]
        )


def _pair(words: list[str], compare: tuple[Path, Path] | None) -> tuple[Path, Path] | None:
    if not words:
        return compare
    if words[0] != "compare" or len(words) != 3 or compare is not None:
        raise UsageError(f"{' '.join(words)!r} cannot be meant", remedy="compare A B")
    return Path(words[1]), Path(words[2])


def described(backend: str, options: dict[str, Any]) -> BackendUnderTest:
    """The backend's description; an option that cannot be meant is said once, not in each case.

    :raises UsageError: what was asked for cannot be meant.
    """
    import asyncio

    from hotbunk.conformance.backends import under_test

    # transformers draws one while it saves a model of a few kilobytes.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    found = under_test(backend, **options)
    try:
        with asyncio.Runner(loop_factory=found.loop_factory) as runner:
            runner.run(found.check_options())
    except BaseException:
        found.close()
        raise
    return found


def level_of(name: str) -> Any:
    """:raises ConfigError: there is no such level."""
    from hotbunk.conformance.case import Level
    from hotbunk.rollout.errors import ConfigError, closest

    known = [one.value for one in Level]
    if name not in known:
        raise ConfigError(f"no level {name!r}{closest(name, known)}", remedy=f"there are {known}")
    return Level(name)


def _run(asked: _Run, out: Path | None) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from hotbunk.conformance.case import chosen
    from hotbunk.conformance.interrupts import terminable
    from hotbunk.conformance.matrix import matrix_of
    from hotbunk.conformance.reports import write_all
    from hotbunk.conformance.runner import accepted, run
    from hotbunk.conformance.show import show

    wanted = level_of(asked.level)
    total = len(chosen(wanted, asked.cases))
    progress = Progress(console=Console(stderr=True), transient=True)
    with terminable():
        found = described(asked.backend, asked.options)
        try:
            with progress:
                task = progress.add_task(found.name, total=total)
                results = run(
                    found,
                    wanted,
                    asked.seed,
                    only=asked.cases,
                    tell=lambda result: progress.advance(task),
                )
        finally:
            found.close()
    console = Console()
    show(console, found, results)
    if out is not None:
        about = {"backend": asked.backend, "level": asked.level, "seed": str(asked.seed)}
        matrix = matrix_of(found, results, command=asked.command, **about)
        path = write_all(found, matrix, out)
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0 if all(accepted(result, found) for result in results) else 1


def main() -> None:
    """``python -m hotbunk.conformance``. 2: what was asked for cannot be meant. 1: it failed."""
    from hotbunk.rollout.errors import HotbunkError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(conformance)
    try:
        app()
    except HotbunkError as error:
        typer.secho(f"hotbunk: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2 if isinstance(error, UsageError) else 1)
