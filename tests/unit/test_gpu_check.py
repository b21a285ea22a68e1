"""What scripts/gpu_check.sh runs on a GPU, as far as a machine without one can run it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hotbunk.rollout import native

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checks(fake_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The pool's checks, in sizes of the fake device (256 MiB), without torch's share."""
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    module = script("gpu_check_pool")
    monkeypatch.setattr(module, "torch_too", False)
    monkeypatch.setattr(module, "nbytes", 64 * MIB)
    monkeypatch.setattr(module, "cycles", 20)
    return module


def test_checks_of_the_pool_hold_on_the_fake_driver(checks: ModuleType) -> None:
    for title, call in checks.ANY_DRIVER:
        assert call(), title


def test_checks_of_the_pool_find_a_driver_that_lies(checks: ModuleType) -> None:
    """One that never counts memory as free again, and one that loses it."""
    import ctypes

    lib = ctypes.CDLL(os.environ["HOTBUNK_CUDA_LIBRARY"])
    lib.fake_cuda_lie.argtypes = (ctypes.c_uint64,) * 3
    lib.fake_cuda_lie(1 << 40, 4, 1 << 30)
    try:
        with pytest.raises(Exception, match="came back"):
            checks.release_and_resume()
    finally:
        lib.fake_cuda_lie(0, 0, 0)


def test_the_engine_check_holds_on_the_host(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(checks, "engine_device", "cpu")
    assert "slept and woke" in checks.engine_sleeps_and_wakes()


def test_without_msgspec_the_checks_run_on_a_stand_in(fake_cuda: Path) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / "scripts/stand_in")!r}, {str(ROOT / "scripts")!r}]
import msgspec
assert "stand_in" in msgspec.__file__
import gpu_check_pool as checks
checks.torch_too, checks.nbytes, checks.cycles = False, {8 * MIB}, 8
for title, call in checks.ANY_DRIVER:
    print(title, call())
checks.engine_device = "cpu"
print(checks.engine_sleeps_and_wakes())
"""
    pytest.importorskip("transformers")
    env = {**os.environ, "HOTBUNK_CUDA_LIBRARY": str(fake_cuda)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 6


def test_kernels_that_nobody_built_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without nvcc: the rest is checked, and the table says what was not."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    whole = script("gpu_check")
    built = native.load()
    monkeypatch.setattr(
        whole.native,
        "load",
        lambda: SimpleNamespace(path=tmp_path / "lib.so", kernels=built.kernels),
    )
    monkeypatch.setattr(whole, "CHECKS", [("pool", lambda: "fine")])
    monkeypatch.setattr(whole, "IPC", [])
    monkeypatch.setattr(whole.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(whole.torch.cuda, "get_device_name", lambda _: "simulated")
    assert whole.main() == 0
    assert [row[:2] for row in whole.rows] == [("kernels load", "skipped"), ("pool", "ok")]
    assert "no nvcc" in capsys.readouterr().out
    (tmp_path / "kernels.fatbin").touch()  # there are some, and they do not load on no GPU
    whole.rows.clear()
    assert whole.main() == 1
    assert whole.rows[0][1] == "FAILED"


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == "no NVIDIA GPU on this machine: nothing to check\n"
