"""An update as a checkpoint that a server on this host can read, and what its model is made of."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hotbunk.rollout import errors
from hotbunk.rollout.contract import ITEMSIZE, Manifest, Placement
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.kernels import fingerprint
from hotbunk.rollout.staging import WholeUpdate

# As safetensors writes what the contract calls by torch's names.
_SHORT = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_LONG = {short: name for name, short in _SHORT.items()}


class Checkpoint:
    """The directory that a server was started from: names, shapes and element types.

    :raises ConfigError: it is not on this host, or holds no safetensors.
    """

    def __init__(self, model: str) -> None:
        self.placements: dict[str, Placement] = {}
        files = sorted(Path(model).glob("*.safetensors"))
        if not files:
            raise errors.ConfigError(
                f"the server's model {model!r} is no directory of safetensors on this host",
                remedy="give the server an absolute path here, or its weight-transfer engine",
            )
        try:
            for file in files:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - it is no mapping
                        its = opened.get_slice(name)
                        dtype = _LONG.get(its.get_dtype(), its.get_dtype())
                        self.placements[name] = Placement(dtype, tuple(its.get_shape()))
        except (SafetensorError, OSError) as error:
            raise errors.ConfigError(f"the server's model cannot be read: {error}") from error

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(
            ITEMSIZE.get(place.dtype, 1) * math.prod(place.shape)
            for place in self.placements.values()
        )


class Staged(WholeUpdate):
    """Whole tensors as a safetensors file in memory without a name: it goes with its last user.

    :raises HostOutOfMemory: there is not so much.
    :raises Unsupported: an element type that the format does not know.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._kind = manifest.fingerprint
        header: dict[str, object] = {}
        starts, at = [], 0
        for spec in manifest.tensors:
            if spec.dtype not in _SHORT:
                raise errors.Unsupported(f"{spec.dtype} in a reload", "vllm_http")
            header[spec.name] = {
                "dtype": _SHORT[spec.dtype],
                "shape": spec.shape,
                "data_offsets": (at, at + spec.nbytes),
            }
            starts.append(at)
            at += spec.nbytes
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        begin = 8 + len(head)
        sizes = [spec.nbytes for spec in manifest.tensors]
        offsets = [begin + start for start in starts]
        super().__init__(manifest, sizes, offsets, begin + at, "hotbunk-reload")
        self.data[:begin] = len(head).to_bytes(8, "little") + head

    def check(self, expected: Mapping[str, int]) -> None:
        """:raises VerifyFailed: what arrived is not what was sent."""
        if self._kind != KIND:
            return
        wrong = set()
        for spec, at in zip(self.specs, self.offsets, strict=True):
            content = torch.empty(0, dtype=torch.uint8)
            if spec.nbytes:
                content = torch.frombuffer(
                    self.data, dtype=torch.uint8, count=spec.nbytes, offset=at
                )
            if expected.get(spec.name) != fingerprint(content):
                wrong.add(spec.name)
            del content  # the file cannot be closed under it
        if wrong:
            raise errors.VerifyFailed(wrong, where="on the way to the server")

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A folder in which the file has a name, while the server reads it."""
        with tempfile.TemporaryDirectory(prefix="hotbunk-reload-") as folder:
            name = Path(folder) / "model.safetensors"
            name.symlink_to(self.path)
            yield Path(folder)
