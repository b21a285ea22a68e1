"""The reference engine: the executable meaning of the contract, embedded and small.

Hugging Face models, continuous batching, paged KV; weights, buffers and KV lie in a memory pool
that really gives memory back. Needs torch and transformers (``pip install 'hotbunk[reference]'``).
"""

from __future__ import annotations

from typing import Any

from hotbunk.rollout.contract import Engine

# What a fork server loads, so that an engine in a process of its own starts at once.
PRELOAD = (
    "hotbunk.rollout.backends.reference.engine",
    "transformers.models.llama.modeling_llama",
)


def create(**options: Any) -> Engine:
    """Build (not start) a reference engine.

    :raises ConfigError: an unknown option, a bad value, or a model directory that cannot be used.
    """
    from hotbunk.rollout.backends.reference.engine import ReferenceEngine
    from hotbunk.rollout.backends.reference.options import ReferenceOptions
    from hotbunk.rollout.options import convert

    return ReferenceEngine(convert(options, ReferenceOptions, "backend reference"))
