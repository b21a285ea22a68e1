"""The application: routes over one replica, and every error as a typed answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hotbunk import __version__
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.server import control, generation, health, weights
from hotbunk.rollout.server.guard import BodyLimit, Signed
from hotbunk.rollout.server.plane import (
    BOOT_HEADER,
    Load,
    Plane,
    answer,
    require_key,
    require_local,
)
from hotbunk.rollout.server.problems import RETRY_SECONDS, problem
from hotbunk.rollout.server.session import Session
from hotbunk.rollout.server.settings import Settings
from hotbunk.rollout.server.streams import LEFT
from hotbunk.rollout.server.text import Texts, Tokenizer

ABOUT = """A rollout engine behind the hotbunk contract: pauses with owners, sleep and wake,
transactional weight updates by reference, and a weight version on every token."""


def create_app(
    replica: ReplicaHandle, tokenizer: Tokenizer, settings: Settings, load: Load | None = None
) -> FastAPI:
    """The application. The replica is started, and stays its owner's to close.

    ``app.state.plane`` is what its routes share. ``load``: see :class:`Plane`.
    """
    plane = Plane(replica, Texts(tokenizer), settings, load)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        plane.texts.close()

    app = FastAPI(title="hotbunk", version=__version__, description=ABOUT, lifespan=life)
    app.state.plane = plane
    keyed = [Depends(require_key)]
    app.include_router(health.router)
    app.include_router(generation.router, dependencies=keyed)
    if settings.control:
        guarded = [*keyed, Depends(require_local)]
        app.include_router(control.router, dependencies=guarded)
        app.include_router(weights.router, dependencies=guarded)
        app.state.session = Session(replica)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HotbunkError, _failed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(ClientDisconnect, lambda request, error: Response(status_code=LEFT))

    app.add_middleware(BodyLimit, most=settings.max_body_bytes)
    app.add_middleware(Signed, name=BOOT_HEADER, value=plane.boot)
    return app


def _invalid(request: Request, error: Exception) -> Response:
    """What was wrong and where; never the input itself, which may be no text at all."""
    assert isinstance(error, RequestValidationError)
    found = [
        {"loc": _place(one["loc"]), "msg": str(one["msg"]), "type": str(one["type"])}
        for one in error.errors()
    ]
    first = found[0]
    what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    about = {"message": what, "type": "ValidationError", "code": 422, "retryable": False}
    return answer({"detail": found, "error": about}, 422)


def _place(loc: tuple[object, ...]) -> list[str | int]:
    """A parameter of the query by its name alone, also where it was given several times."""
    shown = [part if isinstance(part, int) else str(part)[:100] for part in loc]
    return shown[:2] if shown[:1] == ["query"] else shown


def _failed(request: Request, error: Exception) -> Response:
    controls = request.app.state.plane.settings.control and not request.url.path.startswith("/v1/")
    status, body = problem(error, request.url.path.strip("/"), traceback=controls)
    response = answer(body, status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_SECONDS)
    return response


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    about = {"message": error.detail, "type": "Refused", "code": error.status_code}
    response = answer({"error": about}, error.status_code)
    response.headers.update(error.headers or {})
    return response
