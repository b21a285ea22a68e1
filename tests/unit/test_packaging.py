"""The package as installed: slim to import, native library bound, folders linked, names guarded."""

import ast
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import hotbunk
from hotbunk.rollout import native
from hotbunk.rollout.errors import HotbunkError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hotbunk"
LINKS = {
    "benchmarks": "../../benchmarks",
    "checkpoint_engine": "../../checkpoint_engine",
    "configs": "../../configs",
    "conformance": "../../tests/conformance",
    "rollout": "../../rollout",
    "trainer_hooks": "../../trainer_hooks",
}
HEAVY = ("torch", "numpy", "transformers", "safetensors", "vllm", "sglang", "ray", "verl")

needs_native = pytest.mark.skipif(
    bool(os.environ.get("HOTBUNK_PURE")), reason="installed pure on purpose"
)


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "module",
    [
        "hotbunk",
        "hotbunk.rollout.contract",
        "hotbunk.rollout.errors",
        "hotbunk.rollout.lifecycle",
        "hotbunk.rollout.native",
        "hotbunk.configs",
        "hotbunk.cli",
    ],
)
def test_import_is_slim(module: str, tmp_path: Path) -> None:
    done = run_python(f"import sys, {module}; print(sorted(sys.modules))", tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert module in loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_bare_package_loads_nothing_else(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import hotbunk; print(set(sys.modules) - before)"
    done = run_python(code, tmp_path)
    loaded = {name.partition(".")[0] for name in ast.literal_eval(done.stdout)}
    assert loaded - sys.stdlib_module_names == {"hotbunk"}, loaded


@pytest.mark.parametrize("name", sorted(LINKS))
def test_links_are_relative_and_resolve(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert os.readlink(link) == LINKS[name]
    assert (link / "__init__.py").is_file()
    assert link.resolve() == ROOT / LINKS[name].removeprefix("../../")


def test_no_other_links() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_symlink()} == set(LINKS)


def test_bare_checkpoint_engine_is_refused() -> None:
    done = run_python("import checkpoint_engine", ROOT)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "hotbunk.checkpoint_engine" in done.stderr


def test_guard_lets_the_full_name_pass() -> None:
    done = run_python("import hotbunk.checkpoint_engine", ROOT)
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert hotbunk.__version__ == declared == metadata.version("hotbunk")


def test_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@needs_native
def test_native_is_bound() -> None:
    found = native.load()
    assert native.available()
    assert found is native.load()
    assert found.abi_version == native.ABI_VERSION
    assert found.version == hotbunk.__version__
    assert found.page_size == os.sysconf("SC_PAGESIZE")


@needs_native
def test_native_abi_matches_the_header() -> None:
    header = (ROOT / "csrc" / "include" / "hotbunk.h").read_text()
    assert f"#define HB_ABI_VERSION {native.ABI_VERSION}\n" in header


def test_missing_native_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "path", lambda: tmp_path / "libhotbunk_native.so")
    native.load.cache_clear()
    try:
        with pytest.raises(ImportError, match="HOTBUNK_PURE") as caught:
            native.load()
        assert isinstance(caught.value, HotbunkError)
        assert not native.available()
    finally:
        native.load.cache_clear()


@needs_native
def test_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    native.load.cache_clear()
    try:
        with pytest.raises(native.NativeUnavailable, match="has ABI"):
            native.load()
    finally:
        native.load.cache_clear()


def test_a_file_that_is_no_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libhotbunk_native.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "path", lambda: broken)
    native.load.cache_clear()
    try:
        with pytest.raises(native.NativeUnavailable, match="does not load"):
            native.load()
    finally:
        native.load.cache_clear()
