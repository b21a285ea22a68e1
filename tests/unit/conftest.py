"""Fixtures of the unit tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.backends.oracle import VirtualTimeLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Coroutine tests run in virtual time: a deadline of minutes passes at once.

    A module whose tests use threads or other processes defines its own, on a real clock.
    """
    return "asyncio", {"loop_factory": VirtualTimeLoop}


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA library, as the C tests built it, or built now."""
    for found in sorted(ROOT.glob("build/native-*/tests/libfake_cuda.so")):
        sources = [*ROOT.glob("csrc/pool/*.h"), ROOT / "csrc/tests/fake_cuda.cpp"]
        if found.stat().st_mtime > max(s.stat().st_mtime for s in sources):
            return found
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("fake_cuda") / "libfake_cuda.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Icsrc/include"]
    subprocess.run([*command, "csrc/tests/fake_cuda.cpp", "-o", str(library)], check=True, cwd=ROOT)
    return library
