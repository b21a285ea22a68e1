"""``hotbunk train``: configuration in, run directory out."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import typer

from hotbunk.cli.live import LiveTable
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.registry import missing
from hotbunk.trainer_hooks.recipes import config as configuration


def run(overrides: Sequence[str], *, show: bool) -> None:
    """See :func:`hotbunk.cli.train`.

    :raises UsageError: the settings cannot be meant; nothing was written.
    """
    resumed = [text for text in overrides if text.startswith("resume=")]
    others = [text for text in overrides if not text.startswith("resume=")]
    if len(resumed) > 1:
        raise ConfigError("resume= was given more than once")
    if resumed:
        if any(text.startswith("out=") for text in others):
            raise ConfigError("a resumed run stays in its folder: leave out= away")
        settings = configuration.reload(Path(resumed[0].removeprefix("resume=")), others)
    else:
        settings = configuration.load(others)
    if show:
        import msgspec

        typer.echo(msgspec.yaml.encode(settings).decode())
        return
    try:
        import transformers

        from hotbunk.trainer_hooks.recipes.preflight import plan_run
        from hotbunk.trainer_hooks.recipes.train import train
    except ModuleNotFoundError as error:
        raise missing("hotbunk train", error) from error
    transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    plan = plan_run(settings, resume=bool(resumed))
    with LiveTable(settings, first_step=plan.first_step) as table:
        stop = _Stop(table)

        async def job() -> Path:
            stop.listen()
            return await train(plan, on_step=table.show, stopping=lambda: stop.asked)

        try:
            done = asyncio.run(job())
        except asyncio.CancelledError:  # by the second signal: everything in flight has ended
            raise typer.Exit(130) from None
    table.farewell(done, interrupted=stop.asked)
    if stop.asked:
        raise typer.Exit(130)


class _Stop:
    """The first Ctrl-C (or SIGTERM) ends the run after its step, the second at once."""

    def __init__(self, table: LiveTable) -> None:
        self.asked = False
        self._table = table

    def listen(self) -> None:
        """Take the signals of this process's event loop."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            if self.asked and task is not None:
                task.cancel()
            self.asked = True
            self._table.say("stopping after this step; once more to stop at once")

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
