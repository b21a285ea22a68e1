"""Parameters that are spread over trainer ranks (FSDP2, or any DTensor), gathered one at a time.

Gathering is a collective: every trainer rank takes part, and rank 0 sends. Rank 0 alone knows when
a tensor is wanted (a receiver may fail in between, a walk may be repeated), so it tells the others,
over a process group of the source's own. With managers whose ``ranks`` are the trainer's, all ranks
ask for the sync alike, and also let go together:

    every rank   await manager.update_weights(source, version, let_go=...)

Without, the others have no manager:

    rank 0       await manager.update_weights(source, version)    then source.done()
    the others   source.follow()                                  until rank 0 is done
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from hotbunk.checkpoint_engine.source import Rename
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import TARGET, TensorSpec
from hotbunk.rollout.errors import ConfigError, DuplicateName, TrainerFailed

_DONE = -1
# What wrappers put into names, which no engine has.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and checkpoint wrappers add."""
    for one in _WRAPPERS:
        name = name.replace(one, "")
    return name


class ShardedSource:
    """The parameters of a module over the ranks of the default process group.

    Made on every rank, at the same point of the program: it makes a group of its own. One full
    tensor is live at a time. Parameters that are not spread are sent as rank 0 has them.

    :param rename: maps a name; None drops the parameter.
    :param timeout: seconds that ranks wait for one another, and followers for rank 0.
    :raises ConfigError: there is no default process group.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        group: str = TARGET,
        timeout: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "there is no process group", remedy="use module_source for a module in one process"
            )
        self._module = module
        self._rename = rename
        self._group = group
        self._commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._ended = False

    # -- as any source ------------------------------------------------------------------------

    def specs(self) -> tuple[TensorSpec, ...]:
        """Global shapes; nothing is gathered."""
        return tuple(spec for spec, _ in self._parameters())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Full tensors, gathered as they are asked for. On the other ranks: as rank 0 asks for them.

        :raises TrainerFailed: a rank is gone, said nothing in time, or walks in another way.
        """
        if dist.get_rank() == 0:
            self._ended = False
        for index, (_, parameter) in enumerate(self._parameters()):
            self._meet(index)
            full = self._gather(parameter)
            yield full
            del full  # before the next one is gathered

    # -- where the others have no manager -----------------------------------------------------

    def done(self) -> None:
        """Rank 0 wants no more tensors for now: the others' :meth:`follow` returns. Idempotent."""
        if dist.get_rank() == 0 and not self._ended:
            self._command(_DONE)
            self._ended = True

    def follow(self) -> int:
        """Take part in what rank 0 gathers, until it is done. On rank 0: nothing.

        :returns: how many tensors were gathered.
        :raises TrainerFailed: a rank is gone, or said nothing in time.
        """
        gathered = 0
        if dist.get_rank() == 0:
            return gathered
        parameters = self._parameters()
        while (index := self._command(0)) != _DONE:
            self._gather(parameters[index][1])
            gathered += 1
        return gathered

    # -- both ---------------------------------------------------------------------------------

    def _meet(self, index: int) -> None:
        """All ranks are at this parameter of a walk."""
        while (told := self._command(index)) != index:
            if index or told != _DONE:  # a `done` that nobody followed may still lie before a walk
                raise TrainerFailed(
                    f"rank 0 is at parameter {told} of its walk, and this rank at {index}",
                    where=f"trainer rank {dist.get_rank()}",
                )

    def _command(self, index: int) -> int:
        """Rank 0's word to the others."""
        word = torch.tensor([index])
        with _typed("waiting for rank 0" if dist.get_rank() else "telling the other ranks"):
            dist.broadcast(word, 0, group=self._commands)
        return int(word.item())

    @torch.no_grad()
    def _gather(self, parameter: torch.Tensor) -> torch.Tensor:
        if not _is_spread(parameter):
            return parameter.detach()
        with _typed("gathering a parameter"):
            full: torch.Tensor = parameter.full_tensor()  # type: ignore[attr-defined]
        return full.detach()

    def _parameters(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """What is sent, in the same order on every rank; tied parameters once."""
        for child in self._module.modules():
            # After a forward the root may still hold gathered copies, in the type of the compute.
            reshard = getattr(child, "reshard", None)
            if callable(reshard):
                reshard()
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        owner: dict[str, int] = {}
        for raw, parameter in self._module.named_parameters(remove_duplicate=False):
            name = plain_name(raw)
            mapped = self._rename(name) if self._rename else name
            if mapped is None:
                continue
            key = id(parameter)  # a tie is one parameter; shards of two may have one address
            if owner.setdefault(mapped, key) != key:
                raise DuplicateName([mapped])
            tensors[key] = parameter
            if mapped not in names.setdefault(key, []):
                names[key].append(mapped)
        return [(self._spec(names[key], tensor), tensor) for key, tensor in tensors.items()]

    def _spec(self, names: list[str], tensor: torch.Tensor) -> TensorSpec:
        nbytes = tensor.numel() * tensor.element_size()
        first, *aliases = names
        return TensorSpec(
            first,
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            nbytes,
            self._group,
            tuple(aliases),
        )


def _is_spread(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


@contextmanager
def _typed(step: str) -> Iterator[None]:
    """What a collective raises, as ours: a rank died, or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise TrainerFailed(
            f"{step}: {error}",
            where=f"trainer rank {dist.get_rank()}",
            remote_traceback="".join(traceback.format_exception(error)),
        ) from error
