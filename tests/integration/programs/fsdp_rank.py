"""One trainer rank of an FSDP2 job on CPUs: rank 0 walks a ShardedSource, the others follow.

Arguments: rank, world, file of the rendezvous, directory for what rank 0 got, and a fault.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import safetensors.torch as safetensors_torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hotbunk.checkpoint_engine.bucket import Packer
from hotbunk.checkpoint_engine.sources.sharded import ShardedSource
from hotbunk.rollout.errors import HotbunkError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 33)  # 7 and 33 are odd: shards differ
        self.down = nn.Linear(33, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))  # one rank has nothing of it

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)  # type: ignore[no-any-return]


class Counted(ShardedSource):
    """Counts the bytes of gathered tensors that are alive."""

    live: ClassVar[dict[int, int]] = {}
    peak = 0
    count = 0

    def _gather(self, parameter: torch.Tensor) -> torch.Tensor:
        full = super()._gather(parameter).contiguous()
        memory = (ctypes.c_char * full.nbytes)()
        tensor = torch.frombuffer(memory, dtype=full.dtype).view(full.shape)
        tensor.copy_(full)
        Counted.count += 1
        Counted.live[Counted.count] = full.nbytes
        weakref.finalize(memory, Counted.live.pop, Counted.count)
        Counted.peak = max(Counted.peak, sum(Counted.live.values()))
        return tensor


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(11)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(rank: int, world: int, rendezvous: str, out: Path, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    default = dist.group.WORLD
    torch.manual_seed(0)
    whole, model = Model(), Model()
    model.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    said: dict[str, object] = {}
    source = Counted(model, timeout=10.0)
    for walk in range(2):
        train(model)
        with torch.no_grad():
            model(torch.arange(11))  # leaves the root gathered, in bfloat16
        if rank:
            try:
                if fault == "follower dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                said[f"followed {walk}"] = source.follow()
            except HotbunkError as error:
                said["error"] = [type(error).__name__, str(error)]
                break
        else:
            specs = source.specs()
            packer = Packer(specs, source.tensors(), torch.empty(512, dtype=torch.uint8))
            pieces = {s.name: bytearray(s.nbytes) for s in specs}
            try:
                while (bucket := packer.next()) is not None:
                    if fault == "cut off" and walk == 0 and Counted.count > 2:
                        break  # every receiver failed: nobody wants the rest
                    if fault == "leader dies" and Counted.count > 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    for entry in bucket.entries:
                        piece = bytes(
                            bucket.data[entry.offset : entry.offset + entry.nbytes].tolist()
                        )
                        pieces[specs[entry.index].name][
                            entry.start : entry.start + entry.nbytes
                        ] = piece
            except HotbunkError as error:
                said["error"] = [type(error).__name__, str(error)]
                break
            source.done()
            del packer
    if rank == 0 and not said.get("error"):
        got = {
            s.name: torch.frombuffer(pieces[s.name], dtype=getattr(torch, s.dtype)).view(s.shape)
            for s in specs
        }
        safetensors_torch.save_file(got, out / "got.safetensors")
        said["ties"] = [list(s.names) for s in specs if s.aliases]
        said["peak"] = Counted.peak
        said["largest"] = max(s.nbytes for s in specs)
    if not said.get("error"):
        # What it must be, gathered by other means, in the order of the names on every rank.
        state = {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p
            for name, p in model.named_parameters()
        }
        if rank == 0:
            expected = {n: t.detach().contiguous() for n, t in state.items()}
            safetensors_torch.save_file(expected, out / "expected.safetensors")
        said["default group untouched"] = dist.group.WORLD is default
        dist.barrier()
        dist.destroy_process_group()
    (out / f"rank{rank}.json").write_text(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # a group whose peer died may not be torn down in an orderly way


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
