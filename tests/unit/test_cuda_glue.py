"""The CUDA path on a machine without a GPU: the real launch code over a driver that is none.

The fake (csrc/kernels/tests) keeps device memory on the host, runs the kernels' own bodies thread
after thread, logs every call and fails the n-th of any kind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout import native
from hotbunk.rollout.native_kernels import Code

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(not native.available(), reason="installed without the native library"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the fake driver"),
]

PRELUDE = """
import ctypes, json, os, random, sys
from array import array
from pathlib import Path
from hotbunk.rollout import native
from hotbunk.rollout.errors import KernelFailed
from hotbunk.rollout.native_kernels import DType, KV, Run, copy_entry
native.path = lambda: Path(sys.argv[1])
kernels = native.load().kernels
rng = random.Random(1)

def memory(n):
    data = (ctypes.c_ubyte * n).from_buffer_copy(rng.randbytes(n))
    return data, ctypes.addressof(data)

cuda = Run(device=0, stream=0x1234)
data, at = memory(300_001)
out, to = memory(300_001)
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, and a copy of the library with a fatbin beside it."""
    folder = tmp_path_factory.mktemp("fake")
    assert COMPILER is not None
    subprocess.run(
        [
            *(COMPILER, "-shared", "-fPIC", "-O1", "-std=c++17", "-fno-strict-aliasing"),
            *("-I", str(ROOT / "csrc/include"), "-I", str(ROOT / "csrc/kernels/cuda")),
            str(ROOT / "csrc/kernels/tests/fake_kernel_cuda.cpp"),
            *("-o", str(folder / "libfake.so")),
        ],
        check=True,
        timeout=100,
    )
    shutil.copy(native.path(), folder)
    (folder / "hotbunk_kernels.fatbin").write_bytes(b"for the fake driver")
    return folder


def run(fake: Path, code: str, **env: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(fake / native.path().name)],
        env={**os.environ, "HOTBUNK_CUDA_LIBRARY": str(fake / "libfake.so"), **env},
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_launch_is_what_the_kernels_expect(fake: Path, tmp_path: Path) -> None:
    code = """
kernels.copy_many(array("q", copy_entry(at, to, 300_001, DType.BYTES, DType.BYTES)), cuda)
same = bytes(data) == bytes(out)
here = kernels.fingerprints([(at, 300_001, 5), (at, 0, 0), (at, 7, 4095)])
there = kernels.fingerprints([(at, 300_001, 5), (at, 0, 0), (at, 7, 4095)], cuda)
kernels.kv_zero(KV(at, 2, 2, 100, 16, 3200, 1600, 16), [5, 7, 9], 4, 11, cuda)
zeros = [bytes(data)[layer * 1600 + slot * 16] for layer in range(4) for slot in (20, 31, 38)]
print(json.dumps([same, here == there, sum(zeros)]))
"""
    log = tmp_path / "log"
    assert run(fake, code, FAKE_KERNEL_CUDA_LOG=str(log)) == [True, True, 0]
    launches = [line.split()[1:] for line in log.read_text().splitlines() if "Launch" in line]
    assert launches == [
        ["hb_cuda_copy", "2", "1", "1", "256", "0x1234"],
        ["hb_cuda_fingerprint", "3", "1", "1", "256", "0x1234"],
        ["hb_cuda_kv", "3", "4", "1", "256", "0x1234"],
    ]
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    assert calls.count("cuModuleLoadData") == 1, "once a device"
    assert calls.count("cuCtxPushCurrent") == calls.count("cuCtxPopCurrent")


TRY = """
results = []
for _ in range(2):
    try:
        got = kernels.fingerprints([(at, 300_001, 0)], cuda)
        results.append(got == kernels.fingerprints([(at, 300_001, 0)]))
    except KernelFailed as error:
        results.append([error.code, str(error)])
driver = ctypes.CDLL(os.environ["HOTBUNK_CUDA_LIBRARY"])
print(json.dumps([*results, driver.fake_kernel_cuda_depth()]))
"""


@pytest.mark.parametrize(
    "call, code",
    [
        ("cuDeviceGet:1", Code.DRIVER),
        ("cuDevicePrimaryCtxRetain:1", Code.DRIVER),
        ("cuCtxPushCurrent:1", Code.DRIVER),
        ("cuModuleLoadData:1", Code.DRIVER),
        ("cuModuleGetFunction:3", Code.DRIVER),
        ("cuCtxPushCurrent:2", Code.DRIVER),
        ("cuMemAlloc:1", Code.NO_MEMORY),
        ("cuMemsetD8Async:1", Code.DRIVER),
        ("cuMemcpyHtoDAsync:1", Code.DRIVER),
        ("cuLaunchKernel:1", Code.DRIVER),
        ("cuMemcpyDtoHAsync:1", Code.DRIVER),
        ("cuStreamSynchronize:1", Code.DRIVER),
    ],
)
def test_a_driver_call_that_fails_is_told_and_the_next_call_works(
    fake: Path, call: str, code: Code
) -> None:
    [failed, then, depth] = run(fake, TRY, FAKE_KERNEL_CUDA_FAIL=call)
    assert failed[0] == code
    assert "CUDA_ERROR" in failed[1]
    assert then is True
    assert depth == 0, "no context is left on the thread"


@pytest.mark.parametrize("call", ["cuInit:1", "cuDeviceGetCount:1"])
def test_a_driver_that_does_not_start_is_unavailable(fake: Path, call: str) -> None:
    [failed, then, _] = run(fake, TRY, FAKE_KERNEL_CUDA_FAIL=call)
    assert failed[0] == then[0] == Code.UNAVAILABLE
    assert call.split(":", maxsplit=1)[0] in failed[1]


def test_what_is_missing_is_named(fake: Path, tmp_path: Path) -> None:
    code = "print(json.dumps([kernels.why_not_cuda(0), kernels.why_not_cuda(1)]))"
    assert run(fake, code) == ["", "CUDA device 1 of 1"]
    [why, _] = run(fake, code, HOTBUNK_CUDA_LIBRARY=str(tmp_path / "none.so"))
    assert why.startswith("no CUDA driver: ")
    [why, _] = run(fake, code, HOTBUNK_CUDA_LIBRARY=str(fake / native.path().name))
    assert why.endswith("has no function cuInit")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(native.path(), bare)
    (bare / "libfake.so").symlink_to(fake / "libfake.so")
    [why, _] = run(bare, code)
    assert "this build had no nvcc" in why


def test_the_fatbin_holds_every_chip() -> None:
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("no nvcc")
    image = (native.path().parent / "hotbunk_kernels.fatbin").read_bytes()
    for chip in (80, 90, 100):
        assert f"sm_{chip}".encode() in image
    assert b"hb_cuda_kv" in image
