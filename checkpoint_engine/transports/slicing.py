"""Parts of published tensors, read without the rest. Needs no torch, but for verifying.

A part in row-major order is a sequence of *runs*: ranges of the tensor's bytes, in ascending order,
all of one length. Slices of the first dimension alone are one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotbunk.rollout.contract import ITEMSIZE, TensorSpec
from hotbunk.rollout.errors import VerifyFailed

Read = Callable[[int, memoryview], None]  # fill a view with bytes [start, ...)


class Part:
    """Where the bytes of a part lie in its tensor.

    :param slices: ``(start, length)`` of every dimension, within the tensor's bounds.
    """

    def __init__(self, spec: TensorSpec, slices: Sequence[tuple[int, int]]) -> None:
        stride = ITEMSIZE[spec.dtype]
        run, whole = stride, True  # the run grows over inner dimensions that are wanted whole
        outer: list[tuple[int, int, int]] = []  # length, bytes from one to the next, first
        for (start, length), size in zip(reversed(slices), reversed(spec.shape), strict=True):
            if whole:
                run, self._first = run * length, start * stride
                whole = length == size
            else:
                outer.append((length, stride, start * stride))
            stride *= size
        self._outer = outer
        self.run = run

    _first = 0

    def run_at(self, number: int) -> int:
        """Where a run begins in the tensor, in bytes."""
        at = self._first
        for length, stride, first in self._outer:
            number, place = divmod(number, length)
            at += first + place * stride
        return at

    def reader(self, tensor: Read) -> Read:
        """Reads the part as if it lay in one piece."""

        def read(start: int, into: memoryview) -> None:
            while into:
                number, within = divmod(start, self.run)
                count = min(self.run - within, len(into))
                tensor(self.run_at(number) + within, into[:count])
                into, start = into[count:], start + count

        return read


class Checked:
    """A tensor read in blocks that are checked against what was published, each read once in a row.

    :param sums: fingerprints of its blocks of ``block`` bytes, each taken at its place.
    """

    def __init__(
        self, spec: TensorSpec, tensor: Read, sums: Sequence[int], block: int, where: str
    ) -> None:
        self._spec, self._tensor, self._sums, self._block = spec, tensor, sums, block
        self._where = where
        self._number = -1  # of the block that is here
        self._here = memoryview(b"")

    def read(self, start: int, into: memoryview) -> None:
        """:raises VerifyFailed: these are not the bytes that were published."""
        while into:
            number, within = divmod(start, self._block)
            size = min(self._block, self._spec.nbytes - number * self._block)
            count = min(size - within, len(into))
            if count == size and number != self._number:  # all of it is wanted
                self._load(number, into[:count])
            else:
                if number != self._number:
                    self._number, self._here = -1, memoryview(bytearray(size))
                    self._load(number, self._here)
                    self._number = number
                into[:count] = self._here[within : within + count]
            into, start = into[count:], start + count

    def _load(self, number: int, into: memoryview) -> None:
        import torch

        from hotbunk.rollout.kernels import fingerprint

        at = number * self._block
        self._tensor(at, into)
        if fingerprint(torch.frombuffer(into, dtype=torch.uint8), at) != self._sums[number]:
            raise VerifyFailed({self._spec.name}, where=f"{self._where}, bytes from {at}")
