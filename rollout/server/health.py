"""Endpoints that anybody may ask: is it there, and how is it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from hotbunk.rollout.server.plane import Shared, answer
from hotbunk.rollout.status import Health

router = APIRouter(tags=["health"])


@router.get(
    "/health", responses={503: {"description": "The engine is lost, or the server leaves."}}
)
async def health(plane: Shared) -> Response:
    """200 while the engine lives, also when it is busy, asleep or waits for weights."""
    status = await plane.replica.status()
    gone = status.health is Health.LOST or plane.leaving
    told = {
        "health": status.health,
        "leaving": plane.leaving,
        "servable": status.servable,
        "is_paused": status.is_paused,
        "is_sleeping": status.is_sleeping,
    }
    return answer(told, 503 if gone else 200)


@router.get("/metrics")
async def metrics(plane: Shared) -> Response:
    """For Prometheus."""
    page = plane.metrics.page(await plane.replica.status())
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")
