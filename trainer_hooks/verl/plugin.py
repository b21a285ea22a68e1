"""What ``import verl`` loads (entry point group ``verl.plugins``).

It adds names to verl's registries when verl has loaded them: rollouts ``hotbunk_<backend>``,
checkpoint engines ``hotbunk_<transport>``, trainer modes ``hotbunk_sync``, ``hotbunk_colocate_async``
and ``hotbunk_separate_async``. Nothing of verl's is replaced, and a run that selects none of them
goes as if this were not installed.

verl hides what a plugin raises. So whatever fails here is said on stderr, once a process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from hotbunk.trainer_hooks.verl.late import when_loaded

HERE = __name__.rpartition(".")[0]
PREFIX = "hotbunk_"
_said: set[str] = set()


def say(what: str, error: BaseException) -> None:
    """One line about a failure and one about the cure, on stderr; each failure once a process."""
    if what in _said:
        return
    _said.add(what)
    remedy = getattr(error, "remedy", "") or (
        "`hotbunk doctor` says what is missing; VERL_USE_EXTERNAL_PLUGINS=none runs verl without it"
    )
    sys.stderr.write(
        f"hotbunk: its verl plugin failed, {what} cannot be selected: "
        f"{type(error).__name__}: {error}\nhotbunk: {remedy}\n"
    )
    sys.stderr.flush()


def loudly(what: str, act: Callable[[], None]) -> Callable[[], None]:
    """``act``, whose failure is said and goes no further: verl works without us."""

    def acted() -> None:
        try:
            act()
        # A boundary: verl, whatever its version, must not fail on our account.
        except Exception as error:  # noqa: BLE001
            say(what, error)

    return acted


def _backends() -> list[str]:
    from hotbunk.rollout import registry

    # Servers that run elsewhere are nobody's to launch.
    return [name for name in registry.names(registry.BACKENDS) if name != "hotbunk_http"]


def _rollouts() -> None:
    known = sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY
    for name in _backends():
        known[PREFIX + name, "async"] = f"{HERE}.rollout.HotbunkRollout"


def _replicas() -> None:
    known = sys.modules["verl.workers.rollout.replica"].RolloutReplicaRegistry

    def replica() -> type:
        # Not sooner: a worker that is sent the class imports these modules in a circle.
        made: type = importlib.import_module(f"{HERE}.replica").HotbunkReplica
        return made

    for name in _backends():
        known.register(PREFIX + name, replica)


def _engines() -> None:
    importlib.import_module(f"{HERE}.engines")


def _trainers() -> None:
    importlib.import_module(f"{HERE}.trainers")


def register() -> None:
    """Wait for verl's registries. Idempotent in effect: the same names, the same things."""
    when_loaded("verl.workers.rollout.base", loudly("a rollout", _rollouts))
    when_loaded("verl.workers.rollout.replica", loudly("a rollout replica", _replicas))
    when_loaded("verl.checkpoint_engine.base", loudly("a checkpoint engine", _engines))
    when_loaded("verl.trainer.ppo.v1", loudly("a trainer mode", _trainers))


register()
