"""Tensors over memory of an NPU: what torch_npu would be asked for, and how long the memory is held.

There is no torch_npu here. A stand-in has the two functions of it that are called, over memory of the
host; it shows the calls and the lifetimes, and nothing of a device. It runs in a process of its own,
because a name for torch's spare backend is given once for all.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.errors import Unsupported

STAND_IN = """
import ctypes, torch
torch.utils.rename_privateuse1_backend("npu")
asked = []

class _C:
    @staticmethod
    def _construct_storage_from_data_pointer(data_ptr, device, nbytes):
        asked.append((data_ptr, device, nbytes))
        memory = (ctypes.c_char * nbytes).from_address(data_ptr)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    @staticmethod
    def _construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage):
        asked.append(metadata)
        made = torch.empty(0, dtype=metadata["dtype"])
        return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])
"""
PROGRAM = """
import ctypes, gc, weakref
from types import SimpleNamespace
import torch, torch_npu
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.errors import Unsupported

class Lease: pass
memory = (ctypes.c_char * 64)(*range(64))
lease = Lease()
held = weakref.ref(lease)
arena = SimpleNamespace(address=ctypes.addressof(memory), lease=lambda: lease)
pool, region = SimpleNamespace(device="npu:1"), SimpleNamespace(offset=16, nbytes=32)
tensor = tensor_over(pool, arena, region, torch.int16)
assert tensor.shape == (16,) and tensor.dtype is torch.int16
assert tensor.data_ptr() == arena.address + 16, "no copy"
where, lie = torch_npu.asked
assert where == (arena.address + 16, torch.device("npu:1"), 32)
assert lie["data_ptr"] == where[0] and lie["device"] == where[1] and lie["nbytes"] == 32
assert (lie["size"], lie["stride"], lie["storage_offset"]) == ((32,), (1,), 0)
assert lie["dtype"] is torch.uint8
part = tensor[3:5]
arena.lease = None
del lease, tensor
gc.collect()
assert held() is not None, "a view keeps the addresses"
del part
gc.collect()
assert held() is None, "and nobody else does"
del torch_npu._C._construct_storage_from_data_pointer
try:
    tensor_over(pool, arena, region)
except Unsupported as error:
    assert "this torch_npu" in str(error), error
else:
    raise AssertionError("a torch_npu that cannot do it was not noticed")
"""


def test_torch_npu_is_asked_for_a_tensor_that_keeps_the_addresses(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(textwrap.dedent(STAND_IN))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_torch_npu_it_is_named() -> None:
    pool: Any = SimpleNamespace(device="npu:0")
    nothing = cast(Any, SimpleNamespace(nbytes=8, offset=0))
    with pytest.raises(Unsupported, match="install torch_npu"):
        tensor_over(pool, nothing, nothing)
