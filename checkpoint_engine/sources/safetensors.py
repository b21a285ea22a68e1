"""A directory of safetensors files, as models are published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hotbunk.checkpoint_engine.safetensors_header import Stored, stored_in
from hotbunk.rollout.contract import TARGET, TensorSpec
from hotbunk.rollout.errors import ConfigError, DuplicateName


class SafetensorsSource:
    """A directory of safetensors files; one tensor at a time is read.

    Where there is a ``model.safetensors.index.json``, it alone says which files count: what an
    earlier save left beside them is ignored. Specs come from the files' headers, read anew for
    every walk, so the source follows the directory.

    :raises ConfigError: there is none, or a file cannot be read.
    :raises DuplicateName: two files hold a tensor of one name.
    """

    def __init__(self, directory: Path, *, group: str = TARGET) -> None:
        self._directory = directory
        self._group = group
        self._look()

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(one.name, one.shape, one.dtype, one.nbytes, self._group)
            for _, one in self._look()
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        from safetensors import SafetensorError, safe_open

        for path, one in self._look():
            try:
                with safe_open(path, framework="pt") as file:
                    tensor = file.get_tensor(one.name)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
            yield tensor
            del tensor  # before the next one is read

    def _look(self) -> list[tuple[Path, Stored]]:
        found = list(stored_in(self._directory))
        seen: set[str] = set()
        twice = {one.name for _, one in found if one.name in seen or seen.add(one.name)}  # type: ignore[func-returns-value]
        if twice:
            raise DuplicateName(twice)
        return found
