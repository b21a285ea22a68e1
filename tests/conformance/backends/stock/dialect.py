"""What a dialect has to know: its routes, its payloads, and how it says things."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hotbunk.conformance.backends.stock.surface import Surface
from hotbunk.conformance.rig import Unseen
from hotbunk.rollout.capabilities import Ability, unsupported
from hotbunk.rollout.contract import NATIVE, Cache, Capabilities, GenerateRequest, TokenChunk

Query = Mapping[str, Any] | Sequence[tuple[str, str]]


class Call(NamedTuple):
    """One HTTP call; a ``body`` goes as JSON."""

    path: str
    query: Query = ()
    body: Any = None
    method: str = "POST"


Ask = Callable[[Call], Awaitable[Any]]


class Seen(NamedTuple):
    """What a server says of itself now; None: it does not say."""

    paused: bool | None = None
    sleeping: bool | None = None
    running: int | None = None
    steps: int = 0
    label: str = ""


class Dialect(ABC):
    """Verbs to calls, and answers to tokens. It keeps no rule and no state of the server."""

    kind: ClassVar[str]
    unseen: ClassVar[Mapping[str, str]] = {}
    """What it has no way to tell, with reasons (see ``BackendUnderTest.unseen``)."""

    def __init__(self, surface: Surface) -> None:
        self.surface = surface

    def ability(self, *routes: str) -> Ability:
        """NATIVE where it has all these routes."""
        lacking = [route for route in routes if route not in self.surface.routes]
        return unsupported(f"it has no route {', '.join(lacking)}") if lacking else NATIVE

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What its routes could do, as far as the contract has a word for it."""

    @abstractmethod
    def pause(self, mode: str, *, clear_cache: bool) -> Call:
        """A mode that it has no word for goes as it is."""

    @abstractmethod
    def resume(self) -> Call: ...

    @abstractmethod
    def sleep(self, level: Any, mode: str) -> Call:
        """:raises Unseen: it has no levels, or not this one."""

    @abstractmethod
    def release(self, tags: Collection[str], level: int) -> Call:
        """:raises Unseen: it cannot be asked for just these."""

    @abstractmethod
    def wake(self, tags: Collection[str] | None) -> Call: ...

    @abstractmethod
    def reload(self, directory: Path, label: str) -> list[Call]:
        """Take the weights of a model directory, under a label."""

    @abstractmethod
    def abort(self, request_id: str | None) -> Call:
        """One request, or all of them."""

    @abstractmethod
    def forget(self, cache: Cache) -> Call:
        """Reset a cache that ``capabilities.caches`` names."""

    @abstractmethod
    async def seen(self, ask: Ask) -> Seen: ...

    @abstractmethod
    def generate(self, request: GenerateRequest) -> Call: ...

    @abstractmethod
    def reader(self, request: GenerateRequest) -> Reader:
        """For the events of one stream."""


class Reader(ABC):
    """Events of one stream into chunks."""

    @abstractmethod
    def read(self, event: Any) -> Iterator[TokenChunk]:
        """:raises EngineFailed: the event is an error."""

    def end(self) -> Iterator[TokenChunk]:
        """What was still held back when the stream ended."""
        return iter(())


def not_part(what: str) -> Unseen:
    """There is nothing on its surface to try this with."""
    return Unseen(f"{what} is not part of its surface")
