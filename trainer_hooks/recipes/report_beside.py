"""The part of a report about generation beside training: how old, how idle, at what cost."""

from __future__ import annotations

from statistics import median

from hotbunk.trainer_hooks.recipes import charts
from hotbunk.trainer_hooks.recipes.charts import Series
from hotbunk.trainer_hooks.recipes.run_files import Run

OVERLAP = "rollout/overlap"


def is_beside(run: Run) -> bool:
    """Whether generation went on while the trainer trained."""
    return bool(run.curve(OVERLAP)[1])


def cards(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and a note."""
    if not is_beside(run):
        return []
    shares = run.curve(OVERLAP)[1]
    ages = run.curve("rollout/staleness_max")[1]
    return [
        ("overlap", f"{100 * median(shares):.0f} %", "of the training time; median step"),
        ("largest staleness", f"{max(ages, default=0):.0f}", "steps behind the trainer"),
    ]


def note(run: Run) -> str:
    """What a sync cost, in all."""

    def total(name: str) -> float:
        return sum(run.curve(f"rollout/{name}")[1])

    dropped = total("overdue_groups") + total("cut_groups")
    return (
        f"How many steps behind the trainer's the versions are that made a step's tokens, and how "
        f"long syncs held generation still. In all {total('tokens'):.0f} tokens; "
        f"{total('tokens_lost'):.0f} lost to syncs, {total('tokens_recomputed'):.0f} of contexts "
        f"computed again, {total('tokens_overdue'):.0f} left out for their age ({dropped:.0f} groups); "
        f"{total('superseded'):.0f} versions superseded, {total('restarts'):.0f} replicas replaced."
    )


def body(run: Run) -> str:
    """Its charts; nothing for a run whose crews take turns."""
    if not is_beside(run):
        return ""
    ages = [
        Series(name, *charts.thin(*run.curve(f"rollout/staleness_{name}")), colour=place)
        for place, name in enumerate(("p50", "p99", "max"))
    ]
    drawn = charts.line_chart(ages, "Staleness over steps, in steps", height=200)
    waits = [
        Series("stalled", *charts.thin(*run.curve("rollout/stalled_s")), colour=3),
        Series("trainer waits", *charts.thin(*run.curve("timing_s/wait")), colour=0),
    ]
    drawn += charts.line_chart(waits, "Seconds over steps", height=200)
    shares = [Series("overlap", *charts.thin(*run.curve(OVERLAP)), colour=1)]
    return drawn + charts.line_chart(shares, "Overlap over steps", bounds=(0.0, 1.0), height=200)
