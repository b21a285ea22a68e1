"""vLLM, as it is: a thin adapter over ``AsyncLLM``, whose engine core is a process of its own.

Nothing of vLLM is imported before an engine is built. What runs where: :mod:`.engine` (verbs and
streams) and :mod:`.update` (receiving weights) in the caller's process, :mod:`.worker` in the
process that holds the weights, where :mod:`.routes` knows which bytes of a checkpoint lie where.
Needs vLLM 0.32 or newer (``pip install 'hotbunk[vllm]'``).
"""

from __future__ import annotations

import warnings
from typing import Any

from hotbunk.rollout.contract import Engine
from hotbunk.rollout.errors import ConfigError


def create(**options: Any) -> Engine:
    """Build (not start) a vLLM engine.

    :raises ConfigError: an unknown option, a bad value, or a vLLM that lacks what is needed.
    """
    from hotbunk.rollout.backends.vllm import compat
    from hotbunk.rollout.backends.vllm.options import VllmOptions, prepare_environment
    from hotbunk.rollout.options import convert

    chosen = convert(options, VllmOptions, "backend vllm")
    compat.check()
    prepare_environment(chosen)  # vLLM and OpenMP read it while they are imported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM deprecates in itself is not the caller's
            from hotbunk.rollout.backends.vllm.engine import VllmEngine
    except ImportError as error:
        if not (error.name or "").startswith("vllm.") and isinstance(error, ModuleNotFoundError):
            raise  # not installed at all: the registry names the extra
        raise ConfigError(
            f"this vLLM is not the one the adapter was made for: {error}",
            where="backend vllm",
            remedy="it needs vLLM 0.32",
        ) from error
    return VllmEngine(chosen)
