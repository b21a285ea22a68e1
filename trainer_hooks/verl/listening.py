"""A replica of verl's, by HTTP: what a reward function asks a judge (``/v1/chat/completions``).

verl's reward loop reaches its generative reward models behind a router of its own, never by an actor's
methods. Tokens are all that can be had here: memory and weights are verl's to ask the actor for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from hotbunk.rollout.errors import ConfigError, MissingExtra
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.trainer_hooks.recipes.tokenizer import load_tokenizer


class Listening:
    """A socket, from :meth:`start` until its process ends. ``address``: ``host:port``."""

    def __init__(self) -> None:
        self.address = ""

    async def start(self, replica: ReplicaHandle, host: str, model: Path, context: int) -> None:
        """Answer at a free port of ``host``. While the replica sleeps, requests wait (the hold deadline).

        :param model: the directory of its tokenizer, :param context: tokens a sequence may have.
        :raises ConfigError: the directory has no tokenizer, or the host is not this one.
        :raises MissingExtra: there is no server to be had.
        """
        try:
            from hotbunk.rollout.server.app import create_app
            from hotbunk.rollout.server.running import bind, make_server
            from hotbunk.rollout.server.settings import Settings
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"a judge needs the package {error.name!r}, which is not installed",
                remedy="pip install 'hotbunk[server]'",
            ) from error
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        app = create_app(replica, tokenizer, Settings(model=str(model), context=context))
        ready = asyncio.Event()
        sock = bind(host, 0)
        self._server = make_server(app, ready.set)
        self._plane = app.state.plane
        self._serving = asyncio.create_task(self._server.serve([sock]))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise ConfigError(f"nothing can listen on {host}")
        port = sock.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def answer_from(self, replica: ReplicaHandle) -> None:
        """The replica's successor. Without control routes, as here, nothing else of the server knows a replica."""
        self._plane.replica = replica
