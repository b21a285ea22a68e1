"""Weights by reference: a ticket of a transport, or a path under an allowed root. Never bytes.

    init_weight_transfer_engine -> start_weight_update -> update_weights ... -> finish_weight_update
                                                     or abort_weight_update at any point

``init`` gives a generation, and whoever comes again after a restart gets the next one: what an older
client still holds is refused. Each ``update_weights`` is a transaction of its own, committed or not
when it answers; ``finish`` says that what was wanted is there.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from pydantic import AliasChoices, Field, StrictInt, field_validator

from hotbunk.rollout.contract import (
    TARGET,
    Scope,
    ScopeKind,
    Ticket,
)
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.server.control import told
from hotbunk.rollout.server.paths import under_roots
from hotbunk.rollout.server.plane import Shared, answer
from hotbunk.rollout.server.session import Session
from hotbunk.rollout.server.versions import AnyVersion, Count, VersionBody, version_of
from hotbunk.rollout.server.words import Body, Words

router = APIRouter(
    tags=["weights"],
    responses={
        409: {"description": "Out of turn, or refused before a byte; nothing changed."},
        503: {"description": "The update failed, or the engine is lost; the body says why."},
    },
)
SET = "set:"  # how the disk transport names a directory that is read without a sender


# -- bodies -----------------------------------------------------------------------------------


class ScopeBody(Body):
    """How much of the model an update carries."""

    kind: ScopeKind = ScopeKind.FULL
    base: VersionBody | None = None
    name: Words = Field(default="", max_length=256)

    def scope(self) -> Scope:
        return Scope(self.kind, self.base.version() if self.base else None, self.name)


class TicketBody(Body):
    """A transport's ticket, as ``offer.tickets`` has it."""

    transport: str = Field(pattern=r"^[\w.-]{1,64}$")
    address: Words = Field(max_length=4096)
    rank: StrictInt = Field(default=0, ge=0, le=1 << 20)
    ranks: StrictInt = Field(default=1, ge=1, le=1 << 20)
    published: bool = False


class SessionBody(Body):
    """``generation``: what init gave; checked where it is given."""

    generation: Count | None = None


class InitBody(Body):
    """What other engines' transfers want to know; ours is in the tickets."""

    init_info: dict[str, Any] | None = None


class StartBody(SessionBody):
    """``is_checkpoint_format``: names and layout are the checkpoint's, as they always are here."""

    is_checkpoint_format: bool = True


class UpdateBody(SessionBody):
    """One update."""

    ticket: TicketBody
    version: AnyVersion
    scope: ScopeBody = ScopeBody()
    deadline: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)


class FinishBody(SessionBody):
    """``weight_version``: what must have been committed."""

    weight_version: AnyVersion | None = None


class DiskBody(Body):
    """A directory of safetensors files; without one, that of the model this server was started with.

    ``weight_version`` is one step on unless it is given.
    """

    model_path: Words | None = Field(
        default=None, max_length=4096, validation_alias=AliasChoices("model_path", "path")
    )
    weight_version: AnyVersion | None = None
    load_format: str | None = None

    @field_validator("load_format")
    @classmethod
    def _known(cls, said: str | None) -> str | None:
        if said not in (None, "auto", "safetensors"):
            raise ValueError("only safetensors are read")
        return said


class CheckBody(Body):
    """``names``: which tensors (all); ``expected``: fingerprints they must have."""

    names: list[Words] | None = None
    expected: dict[Words, StrictInt] | None = None


# -- routes -----------------------------------------------------------------------------------


def _session(request: Request) -> Session:
    return request.app.state.session  # type: ignore[no-any-return]


OneSession = Annotated[Session, Depends(_session)]


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(
    session: OneSession, body: InitBody | None = None
) -> Response:
    """Begin anew: a generation id. Older clients' ids are refused from now on."""
    return answer({"status": "initialized", "generation": await session.init()})


@router.post("/start_weight_update")
async def start_weight_update(session: OneSession, body: StartBody | None = None) -> Response:
    """Begin a session."""
    body = body or StartBody()
    if not body.is_checkpoint_format:
        raise Unsupported("is_checkpoint_format=false", "hotbunk", "send names of the checkpoint")
    session.start(body.generation)
    return answer({"status": "started", "generation": session.generation})


@router.post("/update_weights")
async def update_weights(plane: Shared, session: OneSession, body: UpdateBody) -> Response:
    """Take one update by its ticket; answers when it is committed, or says why it is not."""
    ticket = Ticket(**body.ticket.model_dump())
    if ticket.transport == "disk" and ticket.address.startswith(SET):
        under_roots(ticket.address.removeprefix(SET), plane.settings.allowed_roots)
    version = version_of(body.version, await plane.newest())
    report = await session.update(
        body.generation, ticket, version, body.scope.scope(), body.deadline
    )
    return told(plane, "committed", report)


@router.post("/finish_weight_update")
async def finish_weight_update(
    plane: Shared, session: OneSession, body: FinishBody | None = None
) -> Response:
    """End a session that has committed something."""
    body = body or FinishBody()
    wanted = body.weight_version
    report = session.finish(
        body.generation, None if wanted is None else version_of(wanted, await plane.newest())
    )
    return told(plane, "finished", report)


@router.post("/abort_weight_update")
async def abort_weight_update(
    plane: Shared, session: OneSession, body: SessionBody | None = None
) -> Response:
    """End a session now. A transfer in the middle of its bytes leaves the weights DIRTY."""
    committed = await session.abort((body or SessionBody()).generation)
    status = await plane.replica.status()
    return answer(
        {"status": "aborted", "ranks": plane.ranks, "committed": committed, "groups": status.groups}
    )


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(
    plane: Shared, session: OneSession, body: DiskBody | None = None
) -> Response:
    """Load a directory's weights, as one update. Also how an engine changes its model's weights."""
    body = body or DiskBody()
    own = plane.settings.model_dir
    if plane.load is None or (body.model_path is None and own is None):
        raise Unsupported("update_weights_from_disk", "this server")
    session.check_idle()
    path = under_roots(body.model_path or str(own), plane.settings.allowed_roots)
    newest = await plane.newest()
    said = body.weight_version
    version = version_of(newest.step + 1 if said is None else said, newest)
    report = await session.run(plane.load(plane.replica, path, version))
    return told(plane, "committed", report)


@router.get("/weight_version")
async def weight_version(plane: Shared) -> Response:
    """The version that is resident; null while there is none."""
    held = (await plane.replica.status()).versions.get(TARGET)
    return answer({"weight_version": None if held is None else str(held)})


@router.get("/weight_info")
async def weight_info(plane: Shared, session: OneSession) -> Response:
    """Every weight group's state and version, and where the session is."""
    status = await plane.replica.status()
    return answer(
        {
            "groups": status.groups,
            "versions": {name: str(version) for name, version in status.versions.items()},
            "health": status.health,
            "servable": status.servable,
            "session": session.step,
            "generation": session.generation,
            "updating": session.busy,
            "ranks": plane.ranks,
        }
    )


@router.post("/weight_checker")
async def weight_checker(plane: Shared, body: CheckBody | None = None) -> Response:
    """Fingerprints of tensors as they lie in the engine; of those ``expected``, which differ."""
    body = body or CheckBody()
    names = body.names if body.expected is None else [*body.expected]
    found = await plane.replica.digest(names)
    differing = [n for n, v in (body.expected or {}).items() if found.values.get(n) != v]
    return answer({**msgspec.to_builtins(found), "differing": differing})
