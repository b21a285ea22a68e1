"""Frames and errors between processes: everything comes back as it went, and nonsense ends it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.options import Options, capabilities
from hotbunk.rollout.contract import Capabilities, Version
from hotbunk.rollout.process import messages, verbs
from hotbunk.rollout.process.connection import Connection
from hotbunk.rollout.process.messages import FromChild, Ready, Result, ToChild
from hotbunk.rollout.process.wire_errors import TREE, WireError, from_wire, to_wire

pytestmark = pytest.mark.anyio

EXAMPLES = [
    errors.UnknownTag("no tag 'x'", remedy="use another"),
    errors.Unsupported("sleep", "oracle", "it never sleeps"),
    errors.WeightsNotLoaded("target", "EMPTY"),
    errors.WeightsPoisoned("target"),
    errors.WeightsNotResident("draft", "DISCARDED"),
    errors.KVNotResident(),
    errors.RequestsInFlight({"b", "a"}, "release", 1.5),
    errors.ReleaseIncomplete(10, 7),
    errors.ResumeOutOfMemory("weights", 10, 3),
    errors.HostOutOfMemory(10, 3),
    errors.KernelFailed("bad stride", 3),
    errors.UnknownNames({"a", "b"}),
    errors.ShapeMismatch("w", "f32[2]", "f32[3]"),
    errors.BaseMismatch(Version(0, 1), Version(0, 2)),
    errors.VersionRegression(Version(0, 2), Version(0, 1)),
    errors.TiedMismatch(["a", "b"]),
    errors.VerifyFailed({"w"}),
    errors.DeadlineExceeded("update", 3.0),
    errors.ReplicaRejecting("leaving"),
    errors.LogprobMismatch(0.5, 0.1),
    errors.EngineFailed("a kernel broke", remote_traceback="Traceback ..."),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_comes_back_as_it_went(error: errors.HotbunkError) -> None:
    error.at("replica3")
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire("verb", error)), type=WireError)
    back = from_wire(wire)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.retryable is error.retryable
    assert back.args == error.args


def test_every_class_of_the_tree_travels() -> None:
    assert {type(e).__name__ for e in EXAMPLES} <= TREE.keys()
    for name, kind in TREE.items():
        back = from_wire(WireError(name, {"what": "w", "where": "here", "remedy": "r"}))
        assert type(back) is kind
        assert str(back) == "[here] w (r)"


def test_what_is_not_of_the_tree_is_the_engines_failure() -> None:
    class Own(errors.UpdateRefused):
        pass

    class Stranger(errors.HotbunkError):
        pass

    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        back = from_wire(to_wire("digest", error))
    assert type(back) is errors.EngineFailed
    assert "digest raised ZeroDivisionError: by zero" in str(back)
    assert "test_process_wire.py" in back.remote_traceback
    assert type(from_wire(to_wire("v", Own("no")))) is errors.UpdateRefused
    assert type(from_wire(to_wire("v", Stranger("no")))) is errors.EngineFailed
    unknown = from_wire(WireError("Evil", {"what": "w", "remote_traceback": 7}))
    assert type(unknown) is errors.EngineFailed
    assert str(unknown) == "Evil: w"
    assert unknown.remote_traceback == "7"


def test_capabilities_come_back_as_they_went() -> None:
    sent = capabilities(Options(unsupported=("pause.wait", "digest")))
    raw = msgspec.msgpack.encode(Ready(sent))
    back = msgspec.msgpack.decode(raw, type=FromChild)
    assert isinstance(back, Ready)
    assert back.capabilities == sent
    assert isinstance(back.capabilities, Capabilities)


def test_arguments_are_named_as_the_methods_parameters_are() -> None:
    """The names are what connects the two sides: a parameter renamed must be renamed there, too."""
    import inspect

    from hotbunk.rollout.replica import Replica

    for name, verb in verbs.REPLICA_VERBS.items():
        parameters = inspect.signature(getattr(Replica, name)).parameters
        assert set(verb.args.__struct_fields__) <= parameters.keys(), name


@asynccontextmanager
async def wire(
    accepts: Any = ToChild,
) -> AsyncIterator[tuple[Connection, list[Any], list[str], socket.socket]]:
    """A connection, what it received, why it ended, and the raw other end."""
    got: list[Any] = []
    ended: list[str] = []
    ours, theirs = socket.socketpair()
    connection = Connection(got.append, ended.append, accepts)
    with theirs:
        theirs.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        yield connection, got, ended, theirs
        connection.abort("test is over")
        await asyncio.sleep(0)


async def soon(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to be")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_frames_in_any_pieces_are_put_together() -> None:
    sent = [
        messages.Call(n, "status", msgspec.Raw(messages.encode(verbs.Nothing()))) for n in (1, 2)
    ]
    data = b"".join(map(messages.frame, [*sent, messages.Cancel(1), messages.Ping()]))
    async with wire() as (_, got, ended, theirs):
        draw = random.Random(3)
        while data:
            size = draw.randint(1, 7)
            theirs.send(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        await soon(lambda: len(got) == 4)
        assert [type(m).__name__ for m in got] == ["Call", "Call", "Cancel", "Ping"]
        assert [m.id for m in got[:2]] == [1, 2]
        assert not ended


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(messages.HEADER, "little") + body


HOSTILE = {
    "too large": (messages.MAX_FRAME + 1).to_bytes(messages.HEADER, "little") + b"x",
    "not msgpack": framed(b"\xc1\xc1\xc1"),
    "no message": framed(b"\x07"),
    "an unknown message": framed(msgspec.msgpack.encode(["Explode", 1])),
    "a wrong type": framed(msgspec.msgpack.encode(["Cancel", "one"])),
    "the other direction": messages.frame(Result(1, msgspec.Raw(b"\xc0"))),
    "empty": framed(b""),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
async def test_nonsense_ends_the_connection(data: bytes) -> None:
    async with wire() as (connection, got, ended, theirs):
        theirs.send(data)
        await soon(lambda: ended)
        assert connection.broken
        assert "broken message" in ended[0]
        assert not got
        connection.send(messages.Ping())  # type: ignore[arg-type]  # into the void, not an error
        await connection.drained()


async def test_the_end_in_the_middle_of_a_frame_is_told() -> None:
    async with wire() as (_, got, ended, theirs):
        theirs.send(messages.frame(messages.Ping())[:-1])
        await asyncio.sleep(0.02)
        theirs.close()
        await soon(lambda: ended)
        assert "bytes of a message" in ended[0]
        assert not got


async def test_random_bytes_never_hang_it() -> None:
    draw = random.Random(11)
    for _ in range(100):
        async with wire() as (_, _, ended, theirs):
            theirs.send(draw.randbytes(draw.randint(1, 200)))
            theirs.close()
            await soon(lambda: ended)


def test_what_cannot_travel_is_refused_where_it_is_sent() -> None:
    with pytest.raises(errors.UsageError, match="plain data"):
        messages.encode({"media": object()})
    with pytest.raises(errors.UsageError, match="too large"):
        messages.frame(Result(1, msgspec.Raw(bytes(messages.MAX_FRAME))))
