"""What lies in a reference engine, read past its verbs: here, or in a process of its own.

In another process a thread answers over a Unix socket, beside everything the engine does. ``setup`` makes
a backend known there whose engines have such a thread.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.transports.unix import inside
from hotbunk.rollout.backends.reference import PRELOAD as _REFERENCE
from hotbunk.rollout.backends.reference import create as create_reference
from hotbunk.rollout.contract import Engine, Tag
from hotbunk.rollout.errors import ResumeOutOfMemory
from hotbunk.rollout.registry import BACKENDS, register

PRELOAD = _REFERENCE
NAME, FOLDER, RANK = "peeked", "HOTBUNK_PEEK", "HOTBUNK_RANK"
SECONDS = 20.0


def read_weight(engine: Any, name: str) -> bytes:
    """The bytes of a tensor of the base or of an adapter."""
    from hotbunk.rollout.kernels import as_bytes

    runner = engine._runner
    adapters = {key.partition("/")[2]: t for key, t in runner.adapters.tensors().items()}
    tensor = adapters[name] if name in adapters else runner.binding.tensor(name)
    return bytes(as_bytes(tensor.contiguous()).tolist())


def corrupt_weight(engine: Any, name: str) -> None:
    """Flip a bit of it."""
    import torch

    from hotbunk.rollout.kernels import as_bytes

    with torch.inference_mode():
        as_bytes(engine._runner.binding.tensor(name))[0] ^= 1


def resident(engine: Any, tag: str) -> int:
    """Bytes of the tag, as the operating system counts them."""
    return int(engine._runner.pool.audit().resident(Tag(tag)))


def host_backup(engine: Any) -> int:
    """Bytes of backups, without the state that is kept through every release."""
    from hotbunk.rollout.arena import Survival

    arena = engine._runner.binding.arena
    state: int = sum(r.nbytes for r in arena.regions.values() if r.survival is Survival.STATE)
    backup: int = engine._runner.pool.memory().backup()
    return max(backup - state, 0)


def sabotage(engine: Any, point: str, how: str) -> bool:
    """Have its own functions raise once, or never return; False: not there.

    A function that hangs holds a thread, which ends with its process only. Nothing of this engine's
    weights is processed after a load: ``post_load`` is where it finds that all bytes have come.
    """
    pool = engine._runner.pool
    if point in ("post_load", "verify"):
        begin = engine._writer

        def spoiled(manifest: Any) -> Any:
            del engine._writer
            made = begin(manifest)
            if point == "verify":
                _break(made, "differing", point, how)
            else:
                _break(made.intake, "finish", point, how)
            return made

        engine._writer = spoiled
        return True
    inside: dict[str, tuple[Any, str]] = {
        "accept": (engine, "_placements"),
        "bucket": (engine, "_writer"),
        "commit": (engine, "_outdate_caches"),
        "label": (engine._residency, "committed"),
        "release": (pool, "release"),
        "resume": (pool, "resume"),
    }
    if point not in inside:
        return False
    _break(*inside[point], point, how)
    return True


def _break(owner: Any, function: str, point: str, how: str) -> None:
    def broken(*args: Any, **more: Any) -> None:
        delattr(owner, function)
        if how == "hang":
            threading.Event().wait()
        raise RuntimeError(f"{point} breaks")

    setattr(owner, function, broken)


def starve(engine: Any, tag: str) -> None:
    """The next time its pool maps the tag, there is no room for it."""
    pool = engine._runner.pool
    mapped = pool.resume

    def without_room(tags: Any) -> Any:
        if tag not in tags:
            return mapped(tags)
        del pool.resume
        needed = sum(a.reserved for a in pool.memory().arenas if a.tag == tag)
        raise ResumeOutOfMemory(tag, needed, 0)

    pool.resume = without_room


class Question(msgspec.Struct, frozen=True):
    """One of the functions above, and its argument."""

    what: str
    of: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What it returned; ``error`` says why there is nothing."""

    data: bytes = b""
    number: int = 0
    error: str = ""


def setup() -> None:
    """Make the backend known in this process."""
    register(BACKENDS, NAME, f"{__name__}:create")


def create(**options: Any) -> Engine:
    """A reference engine with a peephole; its socket is named after its rank."""
    engine = create_reference(**options)
    folder, rank = Path(os.environ[FOLDER]), os.environ.get(RANK, "0")
    (folder / rank).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    with inside(folder) as short:
        listener.bind(f"{short}/{rank}")
    listener.listen()
    threading.Thread(target=_answer, args=(engine, listener), name="peek", daemon=True).start()
    return engine


def ask(folder: Path, rank: int, question: Question) -> Answer:
    """Ask a rank's engine. Blocks, for a moment.

    :raises OSError: nobody is there.
    :raises RuntimeError: it could not be answered.
    """
    with inside(folder) as short, socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(SECONDS)
        asking.connect(f"{short}/{rank}")
        asking.sendall(msgspec.msgpack.encode(question))
        asking.shutdown(socket.SHUT_WR)
        answer = msgspec.msgpack.decode(_read(asking), type=Answer)
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


def _answer(engine: Any, listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            question = msgspec.msgpack.decode(_read(connection), type=Question)
            try:
                answer = _said(engine, question)
            # A boundary between processes: whoever asked hears what went wrong.
            except Exception as error:  # noqa: BLE001
                answer = Answer(error=f"{type(error).__name__}: {error}")
            connection.sendall(msgspec.msgpack.encode(answer))


def _said(engine: Any, question: Question) -> Answer:
    if question.what == "read_weight":
        return Answer(data=read_weight(engine, question.of))
    if question.what == "corrupt_weight":
        corrupt_weight(engine, question.of)
        return Answer()
    if question.what == "starve":
        starve(engine, question.of)
        return Answer()
    if question.what == "sabotage":
        point, _, how = question.of.partition(" ")
        return Answer(number=int(sabotage(engine, point, how)))
    if question.what == "resident":
        return Answer(number=resident(engine, question.of))
    if question.what == "host_backup":
        return Answer(number=host_backup(engine))
    return Answer(number=os.getpid())


def _read(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
