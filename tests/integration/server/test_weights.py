"""Weights over HTTP: the session in its order, tickets, and paths that stay under their roots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

TICKET = {"transport": "shm", "address": "/nobody/there"}
UPDATE = {"ticket": TICKET, "version": 5}


def _kind(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def test_the_disk_is_closed_while_a_session_is_open(server: Any) -> None:
    server.ok("/init_weight_transfer_engine")
    server.ok("/start_weight_update")
    assert _kind(server.post("/update_weights_from_disk")) == (409, "SessionError")
    server.ok("/abort_weight_update")


def test_versions_are_told_and_never_go_back(server: Any, model: Path, other: Path) -> None:
    server.ok("/update_weights_from_disk", {"path": str(other)})
    held = server.get("/weight_version")["weight_version"]
    incarnation, step = map(int, held.split("."))
    low = server.post(
        "/update_weights_from_disk", {"model_path": str(model), "weight_version": step - 1}
    )
    assert _kind(low) == (409, "VersionRegression")
    assert server.get("/weight_version")["weight_version"] == held
    named = {"incarnation": incarnation, "step": step + 7}
    server.ok("/update_weights_from_disk", {"weight_version": named})
    told = server.complete("x", return_weight_versions=True)["choices"][0]
    assert told["weight_version"] == f"{incarnation}.{step + 7}"
    assert told["weight_versions"] == [
        {"version": f"{incarnation}.{step + 7}", "start": 0, "end": 8}
    ]
    info = server.get("/weight_info")
    assert info["versions"]["target"] == f"{incarnation}.{step + 7}"


def test_the_checker_tells_what_differs(server: Any, other: Path) -> None:
    before = server.ok("/weight_checker")
    assert before["differing"] == []
    assert server.get("/get_world_size") == {"world_size": 1}
    same = server.ok("/weight_checker", {"expected": before["values"]})
    assert same["differing"] == []
    server.ok("/update_weights_from_disk", {"model_path": str(other)})
    changed = server.ok("/weight_checker", {"expected": before["values"]})["differing"]
    assert "model.embed_tokens.weight" in changed
    server.ok("/update_weights_from_disk")
    assert server.ok("/weight_checker", {"expected": before["values"]})["differing"] == []


def test_paths_stay_under_their_roots(server: Any, model: Path, other: Path) -> None:
    """Links, dots and files that lead elsewhere are refused; nothing of them is read."""
    outside = model.parent / "outside"
    outside.mkdir(exist_ok=True)
    inside = other / "inside"
    linked = other / "linked"
    leaking = other / "leaking"
    leaking.mkdir()
    try:
        linked.symlink_to(outside)
        (leaking / "model.safetensors").symlink_to("/etc/passwd")
        for path in (
            outside,
            linked,
            leaking,
            inside / ".." / ".." / "outside",
            Path("/etc"),
            Path("/"),
            Path("relative"),
            Path("/nobody/there"),
            Path(f"{other}x"),
        ):
            answer = server.post("/update_weights_from_disk", {"model_path": str(path)})
            assert _kind(answer) == (400, "UsageError"), path
            if path != inside:
                assert "passwd" not in answer.text
        server.ok("/init_weight_transfer_engine")
        server.ok("/start_weight_update")
        set_ticket = {"transport": "disk", "address": f"set:{outside}/full-0.1-1"}
        refused = server.post("/update_weights", {"ticket": set_ticket, "version": 1})
        assert _kind(refused) == (400, "UsageError")
    finally:
        os.unlink(linked)
        os.unlink(leaking / "model.safetensors")
        leaking.rmdir()


def test_a_directory_without_weights_is_said(server: Any, other: Path) -> None:
    empty = other / "empty"
    empty.mkdir()
    answer = server.post("/update_weights_from_disk", {"model_path": str(empty)})
    assert _kind(answer) == (400, "ConfigError")
    empty.rmdir()


def test_tickets_that_cannot_be_meant(server: Any) -> None:
    server.ok("/init_weight_transfer_engine")
    server.ok("/start_weight_update")
    bodies: list[Any] = [
        {"ticket": {"transport": "../x", "address": ""}, "version": 1},
        {"ticket": {"transport": "shm", "address": "x", "ranks": 0}, "version": 1},
        {"ticket": TICKET, "version": -1},
        {"ticket": TICKET, "version": "one"},
        {"ticket": TICKET, "version": 1 << 64},
        {"ticket": TICKET, "version": 1, "deadline": -1},
        {"ticket": TICKET},
        {"version": 1},
        {"ticket": "gASVIAAAAAAAAACMCGJ1aWx0aW5zlIwEZXZhbJSTlIwEMSsxMZSFlFKULg==", "version": 1},
    ]

    for body in bodies:
        assert server.post("/update_weights", body).status_code == 422, body


def test_addresses_that_lead_nowhere_are_typed(server: Any) -> None:
    server.ok("/init_weight_transfer_engine")
    server.ok("/start_weight_update")
    for transport in ("naive", "collective", "disk", "shm", "nobody"):
        for address in ("", "x", "127.0.0.1:1", "tcp://127.0.0.1:1/x", "/etc/passwd", "\0"):
            ticket = {"transport": transport, "address": address}
            answer = server.post("/update_weights", {"ticket": ticket, "version": 1 << 40})
            assert answer.status_code in (400, 409, 503), answer.text
            assert answer.json()["error"]["type"] != "EngineFailed", answer.text
    assert server.get("/weight_info")["health"] == "ok"
