"""``hotbunk plan``: what a run's memory will be, before anything is started."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotbunk.rollout.registry import BACKENDS, find, missing
from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.charts import bytes_text, seconds_text

if TYPE_CHECKING:
    from hotbunk.trainer_hooks.recipes.forecast import MemoryPlan

_COLOURS = {
    "weights": "blue",
    "kv_cache": "cyan",
    "trainer": "yellow",
    "bucket": "magenta",
    "reference_policy": "green",
    "critic": "red",
    "judge": "bright_blue",
}
_WIDE = 32  # characters of a bar


def run(overrides: Sequence[str], *, model: Path | None, memory: str | None, json: bool) -> int:
    """See :func:`hotbunk.cli.plan`. :returns: the exit code."""
    try:
        from hotbunk.trainer_hooks.recipes import forecast, sizes
        from hotbunk.trainer_hooks.recipes.judge import judge_model
    except ModuleNotFoundError as error:
        raise missing("hotbunk plan", error) from error
    chosen = [*overrides, *([f"model={model}"] if model else [])]
    settings = configuration.load(chosen)
    find(BACKENDS, settings.rollout.name)
    device, free = sizes.device_memory()
    here = memory is None
    if memory is not None:
        device, free = "a device of that size", sizes.parse_bytes(memory)
    with sizes.model_directory(settings) as directory:
        shapes = sizes.shapes_of(directory)
    judge = sizes.shapes_of(judge_model(settings.judge)) if settings.judge.used else None
    on_host = not device.startswith("cuda") and here
    rates = forecast.measure_rates() if on_host else None
    plan = forecast.forecast(settings, shapes, device, free, rates, judge)
    if json:
        typer.echo(json_module.dumps(_plain(plan), indent=1))
    else:
        _show(plan, Console())
    return 0 if plan.fits else 1


def _plain(plan: MemoryPlan) -> dict[str, object]:
    """As JSON has it: with the sum of each phase."""
    phases = [{**msgspec.to_builtins(one), "total": one.total} for one in plan.phases]
    return {**msgspec.to_builtins(plan), "phases": phases}


def _show(plan: MemoryPlan, console: Console) -> None:
    console.print(_parts(plan.parameters, msgspec.structs.asdict(plan.parts)))
    phases = Table(title="resident in each phase of a step", title_justify="left")
    for name in ("phase", "device", "host backup", ""):
        phases.add_column(name, justify="right" if name in ("device", "host backup") else "left")
    scale = max(plan.peak_bytes, 1)
    for phase in plan.phases:
        most = " ◀" if phase.name == plan.peak_phase else ""
        phases.add_row(
            phase.name,
            bytes_text(phase.total),
            bytes_text(phase.host) if phase.host else "-",
            _bar(phase.levels, scale).append(most),
        )
    console.print(phases)
    legend = Text()
    for name, colour in _COLOURS.items():
        legend.append("■ ", colour).append(f"{name}  ")
    console.print(legend)
    console.print(
        "The trainer's activations, and what an engine needs beside weights and KV, are not counted."
    )
    verdict = "fits" if plan.fits else "does not fit"
    colour = "green" if plan.fits else "red"
    console.print(
        Text(
            f"{bytes_text(plan.peak_bytes)} of {bytes_text(plan.memory)} ({plan.device}): "
        ).append(verdict, colour)
    )
    if plan.switch is not None:
        console.print(
            f"Taking turns costs about {seconds_text(plan.switch.seconds)} a step (this host's memory, "
            f"measured now); keeping everything needs {bytes_text(plan.switch.kept_peak_bytes)}."
        )
    elif not plan.device.startswith("cuda"):
        console.print("What taking turns costs is measured where it runs: leave --memory away.")
    for change in plan.changes:
        mark = "fits" if change.fits else "still too much"
        console.print(f"  {' '.join(change.overrides)}: {bytes_text(change.peak_bytes)}, {mark}")
    if not plan.fits and not any(change.fits for change in plan.changes):
        console.print("No change of these settings is enough: use more devices or a smaller model.")


def _parts(parameters: int, parts: Mapping[str, int]) -> Table:
    table = Table(title=f"{parameters:,} parameters", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for name, size in parts.items():
        table.add_row(name.replace("_", " "), bytes_text(size) if size else "-")
    return table


def _bar(levels: Mapping[str, int], scale: int) -> Text:
    bar, before, drawn = Text(), 0, 0
    for name, size in levels.items():
        before += size
        upto = round(before / scale * _WIDE)
        bar.append("█" * (upto - drawn), _COLOURS.get(name, "white"))
        drawn = upto
    return bar
