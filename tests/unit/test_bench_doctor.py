"""`hotbunk bench` and `hotbunk doctor`: shapes, refusals, and that they say what is missing."""

from __future__ import annotations

import ctypes
import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotbunk.benchmarks import kernels as bench_kernels
from hotbunk.benchmarks.rows import Row, in_turns, markdown, rate_row, write_json, write_markdown
from hotbunk.cli import app
from hotbunk.rollout import kernels, native
from hotbunk.rollout.errors import ConfigError, Unsupported

# The package's attributes of these names are the commands.
bench = importlib.import_module("hotbunk.cli.bench")
doctor = importlib.import_module("hotbunk.cli.doctor")
FIELDS = {"name", "ours", "peer", "limit", "unit", "ratio_peer", "ratio_limit", "n", "spread"}


def rows() -> list[Row]:
    limit = (1000, lambda: sum(range(100)))
    return [rate_row("a", 1000, lambda: 1, lambda: sum(range(1000)), "`peer`", limit)]


def test_calls_take_turns() -> None:
    order: list[str] = []
    seconds = in_turns([lambda: order.append("a"), lambda: order.append("b")], repeats=2)
    assert order == ["a", "b"] * 3
    assert [len(s) for s in seconds] == [2, 2]


def test_rows_are_written_as_an_array(tmp_path: Path) -> None:
    write_json(rows(), tmp_path / "rows.json")
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row.keys() >= FIELDS
    assert row["ratio_peer"] > 1
    assert row["n"] >= 5
    assert row["spread"][0] <= row["ours"] <= row["spread"][1]
    text = markdown("a", [*rows(), Row("b", 1.0, None, None, "ms", None, None, 5, [1.0, 1.0])], "x")
    assert "| `a` |" in text
    assert "| `b` | 1.0 [1.0, 1.0] ms | - | - | - | - | 5 |  |" in text


def test_a_section_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "b.md"
    for name, text in (("a", "1"), ("b", "2"), ("a", "3")):
        write_markdown(path, name, f"## {name}\n\n{text}\n")
    text = path.read_text()
    assert text.startswith("# Benchmarks\n")
    assert text.endswith("\n\n## a\n\n3\n\n## b\n\n2\n")


def test_bench_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "run", lambda tell: (tell("x"), (rows(), "2 threads"))[1])
    out, md = tmp_path / "k.json", tmp_path / "k.md"
    done = CliRunner().invoke(app, ["bench", "kernels", "--json", str(out), "--md", str(md)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())[0]["name"] == "a"
    assert "2 threads" in md.read_text()


def test_bench_knows_its_names_and_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'kernels'"):
        bench.run("kernel", json=None, md=None)
    monkeypatch.setattr(kernels, "native_kernels", lambda: None)
    with pytest.raises(Unsupported):
        bench_kernels.run(lambda part: None)


def test_shapes_of_the_135m_model() -> None:
    shapes = bench_kernels.SHAPES_135M
    assert len(shapes) == 272
    sizes = [s[0] * (s[1] if len(s) > 1 else 1) for s in shapes]
    assert sum(sizes) == 134_515_008


def test_doctor_lists_findings() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert all(f.keys() == {"kind", "name", "usable", "why", "remedy"} for f in found)
    by_name = {(f["kind"], f["name"]): f for f in found}
    assert by_name["version", "python"]["usable"]
    assert by_name["driver", "host"]["usable"] is native.available()
    assert by_name["driver", "shared"]["why"]
    assert by_name["setting", "expandable segments"]["usable"]
    assert by_name["backend", "oracle"]["usable"]
    assert by_name["transport", "naive"]["usable"]
    assert {"cuda", "acl"} <= {name for kind, name in by_name if kind == "driver"}
    for f in found:
        assert f["usable"] or (f["why"] and f["remedy"]), f
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_doctor_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: name not in ("vllm", "transformers"))
    found = {(f.kind, f.name): f for f in doctor.findings()}
    assert found["backend", "vllm"].remedy == "pip install 'hotbunk[vllm]'"
    assert found["backend", "reference"].remedy == "pip install 'hotbunk[reference]'"
    assert not found["backend", "reference"].usable


def test_doctor_in_a_pure_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "path", lambda: tmp_path / "libhotbunk_native.so")
    native.load.cache_clear()
    try:
        found = {(f.kind, f.name): f for f in doctor.findings()}
    finally:
        native.load.cache_clear()
    assert not found["native", "library"].usable
    assert "HOTBUNK_PURE" in found["native", "library"].remedy
    assert not found["native", "kernels"].usable
    assert not found["driver", "host"].usable
    assert "HOTBUNK_PURE" in found["driver", "host"].remedy


def test_doctor_asks_the_cuda_driver_whether_there_is_a_device(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    lib = ctypes.CDLL(str(fake_cuda))
    lib.fake_cuda_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)

    def cuda() -> doctor.Finding:
        return {(f.kind, f.name): f for f in doctor.findings()}["driver", "cuda"]

    assert cuda().usable
    lib.fake_cuda_fail(b"cuDeviceGet", 1, 100)
    found = cuda()
    assert not found.usable
    assert "cuDeviceGet says 100" in found.why
    assert cuda().usable


@pytest.mark.skipif(not native.available(), reason="installed without the native library")
def test_syncs_are_timed_against_their_peers_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way, with weights of a few kilobytes; each is checked before it is timed."""
    from hotbunk.benchmarks import sync as bench_sync

    monkeypatch.setattr(bench_sync, "SIZES", {"small": [(64, 33), (7,)]})
    monkeypatch.setattr(bench_sync, "REPEATS", 1)
    monkeypatch.setattr(bench_sync, "PATIENCE", 1.0)
    out = tmp_path / "sync.json"
    done = CliRunner().invoke(app, ["bench", "sync", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    ways = ("shm", "onecopy", "shm_verified", "onecopy_verified")
    assert {f"sync_small_{way}" for way in ways} < {row["name"] for row in rows}
    assert len(rows) == len({row["name"] for row in rows}) >= 6
    assert all(row["ours"] > 0 and row["peer"] > 0 and row["unit"] == "GB/s" for row in rows)


def test_a_managers_own_time_is_measured_and_its_peer_must_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotbunk.benchmarks import manager as bench_manager

    monkeypatch.setattr(bench_manager, "SIZES", (1, 3))
    monkeypatch.setattr(bench_manager, "REPEATS", 3)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho noise\necho \'{"1": [0.001, 0.002, 0.003], "3": [0.01]}\'\n')
    fake.chmod(0o700)
    measured, _ = bench_manager.run(lambda text: None, peer_python=fake)
    found = {row.name: row for row in measured}
    assert found["manager_1"].peer == 2000.0
    assert found["manager_3"].ratio_peer == pytest.approx(10_000 / found["manager_3"].ours)
    assert found["rules_3"].ours * 1e3 > found["manager_3"].ours > 0
    for path, message in ((tmp_path / "absent", "cannot be run"), (Path("/bin/false"), "failed")):
        with pytest.raises(ConfigError, match=message):
            bench_manager.run(lambda text: None, peer_python=path)
    with pytest.raises(ConfigError, match="another interpreter"):
        bench.run("kernels", json=None, md=None, peer_python=fake)
