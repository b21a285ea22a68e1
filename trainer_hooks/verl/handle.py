"""A replica in a Ray actor, driven from anywhere in the job.

Ray carries bytes: the arguments, results and errors of ``rollout/process``, encoded as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import msgspec

from hotbunk.rollout.contract import Capabilities, GenerateRequest, TokenChunk
from hotbunk.rollout.errors import HotbunkError, ReplicaLost
from hotbunk.rollout.process.handle import ProcessHandle
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.process.remote import Remote
from hotbunk.rollout.process.spec import ReplicaSpec
from hotbunk.rollout.process.verbs import GENERATE, REPLICA_VERBS, Generate, Nothing
from hotbunk.rollout.process.wire_errors import WireError, from_wire, to_wire


class Answer(msgspec.Struct, frozen=True):
    """What comes back of a call: a value, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    error: WireError | None = None


class Introduction(msgspec.Struct, frozen=True):
    """What a handle must know of the replica it is for."""

    spec: ReplicaSpec
    capabilities: Capabilities


async def answered(target: Any, verb: str, args: bytes) -> bytes:
    """In the actor: run a verb of ``target`` and encode what came of it."""
    try:
        kind = REPLICA_VERBS[verb]
        told = msgspec.msgpack.decode(args, type=kind.args)
        fields = {name: getattr(told, name) for name in told.__struct_fields__}
        value = await getattr(target, verb)(**fields)
        return encode(Answer(value=msgspec.Raw(encode(value))))
    # A boundary between processes: whatever is raised goes to who asked.
    except Exception as error:  # noqa: BLE001
        return encode(Answer(error=to_wire(verb, error)))


def opened(name: str, data: bytes, kind: Any = None) -> Any:
    """What an :class:`Answer` holds, as ``kind``. :raises HotbunkError: the error it holds."""
    answer = msgspec.msgpack.decode(data, type=Answer)
    if answer.error is not None:
        raise from_wire(answer.error)
    return msgspec.msgpack.decode(answer.value, type=kind)


class _ActorRemote:
    """The calls of a :class:`ProcessHandle`, over an actor instead of a socket."""

    def __init__(self, actor: Any, known: Introduction) -> None:
        self.actor = actor
        self.spec = known.spec
        self.capabilities = known.capabilities

    async def call(self, verb: str, args: msgspec.Struct | None = None) -> Any:
        reference = self.actor.verb.remote(verb, encode(args or Nothing()))
        try:
            data = await reference
        except asyncio.CancelledError:
            import ray

            ray.cancel(reference)
            raise
        except HotbunkError:
            raise
        # A boundary: Ray's own errors are many; they all say that the actor cannot be asked.
        except Exception as error:
            raise self._lost(error) from error
        return opened(verb, data, REPLICA_VERBS[verb].result)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        chunks = self.actor.stream.options(num_returns="streaming").remote(
            encode(Generate(request))
        )
        try:
            async for reference in chunks:
                yield opened(GENERATE, await reference, TokenChunk)
        except HotbunkError:
            raise
        # A boundary, as above.
        except Exception as error:
            raise self._lost(error) from error

    async def close(self) -> None:
        """End the replica and its actor. Idempotent: one that is dead has ended."""
        import ray

        with suppress(ray.exceptions.RayActorError):
            await self.actor.close.remote()
            ray.kill(self.actor)

    def _lost(self, error: Exception) -> ReplicaLost:
        return ReplicaLost(
            f"its Ray actor cannot be asked: {type(error).__name__}: {error}", where=self.spec.name
        )


class RayHandle(ProcessHandle):
    """A replica's verbs, across a Ray actor. Errors are the replica's own.

    An actor that died or cannot be reached: every call raises ``ReplicaLost``, ``status`` says LOST.
    """

    def __init__(self, actor: Any, known: Introduction) -> None:
        super().__init__(cast(Remote, _ActorRemote(actor, known)))

    @classmethod
    async def of(cls, actor: Any) -> RayHandle:
        """The handle to a :class:`~hotbunk.trainer_hooks.verl.server.RolloutServer`."""
        data = await actor.introduction.remote()
        return cls(actor, msgspec.msgpack.decode(data, type=Introduction))
