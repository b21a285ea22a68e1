"""What has been run, kept: matrices of several deployments, and the section of a document made of them.

    python -m hotbunk.conformance.recorded DOCUMENT [NAME=DIR ...]

``DIR`` is a run's ``--out`` folder (no ``=`` in it), ``NAME`` how the document calls what was tried; a later
run of that name replaces the earlier. Beside ``x.md`` lies ``x.json`` with all of them; between two marks of
``x.md`` stands what is made of it. Without a run, it is only made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hotbunk.conformance.case import Status
from hotbunk.conformance.matrix import Matrix, read_matrix
from hotbunk.rollout.errors import ConfigError, HotbunkError

BEGIN, END = "<!-- what has been run -->\n", "<!-- end -->\n"
PASSED, REFUSED, NOT_RUN, BROKEN, ABSENT = "pass", "refused", "not run", "**fails**", ""


class Recorded(msgspec.Struct, frozen=True):
    """One run of a deployment. Each case is in one of the four; reasons and details by case."""

    name: str
    command: str
    level: str
    when: str
    versions: Mapping[str, str]
    seconds: float
    simulated: bool
    passed: tuple[str, ...]
    refused: tuple[str, ...]
    not_run: Mapping[str, str]
    broken: Mapping[str, str]

    def cell(self, case: str) -> str:
        """How the case ended here."""
        if case in self.passed:
            return PASSED
        if case in self.refused:
            return REFUSED
        if case in self.not_run:
            return NOT_RUN
        return BROKEN if case in self.broken else ABSENT

    @property
    def cases(self) -> list[str]:
        """All that were run."""
        return [*self.passed, *self.refused, *self.not_run, *self.broken]


def recorded(name: str, matrix: Matrix) -> Recorded:
    """A run under that name. A case not run for no listed reason is broken, as in its exit code."""
    bad = {one.case for one in matrix.bad()}
    by = {
        status: [one.case for one in matrix.cases if one.status is status and one.case not in bad]
        for status in (Status.PASS, Status.UNSUPPORTED, Status.NOT_RUN)
    }
    return Recorded(
        name,
        matrix.command,
        matrix.level,
        matrix.when,
        matrix.versions,
        sum(one.seconds for one in matrix.cases),
        matrix.simulated,
        tuple(by[Status.PASS]),
        tuple(by[Status.UNSUPPORTED]),
        {case: matrix.expected_not_run[case] for case in by[Status.NOT_RUN]},
        {one.case: one.detail for one in matrix.cases if one.case in bad},
    )


def section(runs: Sequence[Recorded]) -> str:
    """The part of the document between its marks."""
    lines = [
        "| deployment | versions | when (UTC) | level | seconds | pass | refused, as declared | not run | fails |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        versions = ", ".join(f"{name} {its}" for name, its in run.versions.items())
        about = f"{run.name} (simulated)" if run.simulated else run.name
        counts = (run.passed, run.refused, run.not_run, run.broken)
        lines.append(
            f"| {about} | {versions} | {run.when} | {run.level} | {run.seconds:.0f} | "
            + " | ".join(str(len(some)) for some in counts)
            + " |"
        )
    lines += ["", *(f"- {run.name}: `{run.command}`" for run in runs)]
    names = list(dict.fromkeys(case for run in runs for case in run.cases))
    alike = [case for case in names if all(run.cell(case) == PASSED for run in runs)]
    lines += ["", "What did not pass in all of them:", ""]
    lines += ["| case | " + " | ".join(run.name for run in runs) + " |"]
    lines += ["|---" * (len(runs) + 1) + "|"]
    lines += [
        f"| `{case}` | " + " | ".join(run.cell(case) for run in runs) + " |"
        for case in names
        if case not in alike
    ]
    lines += ["", *_reasons(runs)]
    lines += [f"Passed in all of them ({len(alike)}): " + ", ".join(f"`{one}`" for one in alike)]
    return "\n".join(lines) + "\n"


def _reasons(runs: Sequence[Recorded]) -> list[str]:
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in runs:
        for how, some in ((NOT_RUN, run.not_run), (BROKEN, run.broken)):
            for case, why in some.items():
                its = found.setdefault((how, " ".join(why.split())), {})
                its.setdefault(case, []).append(run.name)
    lines = []
    for (how, why), cases in found.items():
        where = list(dict.fromkeys(name for names in cases.values() for name in names))
        listed = ", ".join(f"`{case}`" for case in cases)
        lines.append(f"- {how}: {why} ({', '.join(where)}): {listed}")
    return [*lines, ""] if lines else []


def read_runs(document: Path) -> list[Recorded]:
    """Those kept beside a document; none if there are none yet.

    :raises ConfigError: what lies there is something else.
    """
    kept = document.with_suffix(".json")
    if not kept.exists():
        return []
    try:
        return msgspec.json.decode(kept.read_bytes(), type=list[Recorded])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{kept} holds no recorded runs: {error}") from error


def made(document: Path, runs: Sequence[Recorded]) -> str:
    """The document with its section made of these runs.

    :raises ConfigError: it has no place for one.
    """
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{document} has no place for this", remedy=f"{BEGIN}{END}")
    return before + begin + section(runs) + end + after


def write(document: Path, new: Sequence[Recorded]) -> None:
    """Keep these runs beside the document, and make its section of all that are kept.

    :raises ConfigError: as :func:`read_runs` and :func:`made`.
    """
    runs = {run.name: run for run in (*read_runs(document), *new)}
    text = made(document, list(runs.values()))
    encoded = msgspec.json.format(msgspec.json.encode(list(runs.values())), indent=1)
    document.with_suffix(".json").write_bytes(encoded + b"\n")
    document.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """See the module. 2: what was asked for cannot be meant."""
    try:
        if not arguments or any("=" not in one for one in arguments[1:]):
            raise ConfigError("DOCUMENT [NAME=DIR ...] was not what came")
        pairs = [one.rsplit("=", 1) for one in arguments[1:]]
        new = [recorded(name, read_matrix(Path(where))) for name, where in pairs]
        write(Path(arguments[0]), new)
    except (HotbunkError, OSError) as error:
        print(f"hotbunk: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
