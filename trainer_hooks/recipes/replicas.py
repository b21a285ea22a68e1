"""The engines of a run: here, or in processes of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from hotbunk.rollout import process
from hotbunk.rollout.errors import ConfigError, Unsupported
from hotbunk.rollout.handle import LocalHandle, ReplicaHandle
from hotbunk.rollout.options import convert_nested
from hotbunk.rollout.process import ProcessHandle, ReplicaSpec
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines
from hotbunk.trainer_hooks.recipes.config import RolloutConfig

THREADS = "HOTBUNK_TORCH_THREADS"
HTTP = "hotbunk_http"  # servers that run already, each a replica


async def start_replicas(
    config: RolloutConfig, options: Mapping[str, Any], stack: AsyncExitStack
) -> list[ReplicaHandle]:
    """Start ``config.replicas`` of them; the stack closes them, also when one does not start.

    :raises HotbunkError: what kept the first of them that did not start.
    """
    if config.name == HTTP:
        return await _connected(options, stack)
    names = [f"replica{number}" for number in range(config.replicas)]
    deadlines = Deadlines(hold=config.hold_deadline)
    if not config.process:
        handles: list[ReplicaHandle] = []
        for name in names:
            replica = Replica(
                create_backend(config.name, **options), name=name, deadlines=deadlines
            )
            stack.push_async_callback(replica.close)
            await replica.start()
            handles.append(LocalHandle(replica))
        return handles
    stack.callback(process.trim)
    spec = ReplicaSpec(
        config.name,
        options,
        deadlines=deadlines,
        data_parallel=config.data_parallel,
        env={THREADS: str(config.threads)} if config.threads else {},
        setup=f"{__name__}:set_threads" if config.threads else "",
    )
    starting = [
        asyncio.ensure_future(process.start(msgspec.structs.replace(spec, name=name)))
        for name in names
    ]
    try:
        started = await asyncio.gather(*starting, return_exceptions=True)
    except asyncio.CancelledError:
        started = await asyncio.gather(*starting, return_exceptions=True)
        for handle in started:
            if isinstance(handle, ProcessHandle):
                await handle.close()
        raise
    for handle in started:
        if isinstance(handle, ProcessHandle):
            stack.push_async_callback(handle.close)
    for handle in started:
        if isinstance(handle, BaseException):
            raise handle
    return [handle for handle in started if isinstance(handle, ProcessHandle)]


def http_options(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of each server: ``url`` may be a list of them.

    :raises ConfigError: there is none.
    """
    said = options.get("url") or []
    urls = [said] if isinstance(said, str) else list(said)
    if not urls:
        raise ConfigError("no server was named", remedy="set rollout.options.url=http://host:port")
    return [{**options, "url": url} for url in urls]


async def _connected(options: Mapping[str, Any], stack: AsyncExitStack) -> list[ReplicaHandle]:
    from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
    from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions

    handles: list[ReplicaHandle] = []
    for number, one in enumerate(http_options(options)):
        told = convert_nested(one, HttpOptions, "rollout.options")
        handle = await HttpHandle.connect(told, f"replica{number}")
        stack.push_async_callback(handle.close)
        handles.append(handle)
    return handles


async def successor(lost: ReplicaHandle, stack: AsyncExitStack) -> ReplicaHandle:
    """A new process in place of a lost one, started from the same; the stack closes it.

    A server is not ours to start: if somebody has started it again, we connect to it again.

    :raises Unsupported: the replica has no process of its own.
    :raises HotbunkError: what kept it from starting.
    """
    handle: ReplicaHandle
    if isinstance(lost, ProcessHandle):
        handle = await process.start(lost.spec)
    elif isinstance(lost, LocalHandle):
        raise Unsupported("a successor", "a replica without a process", "rollout.process=true")
    else:
        from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle

        assert isinstance(lost, HttpHandle)
        handle = await HttpHandle.connect(lost.options, lost.name)
    stack.push_async_callback(handle.close)
    return handle


def set_threads() -> None:
    """In an engine's process: as many threads of torch as its trainer said."""
    import torch

    torch.set_num_threads(int(os.environ[THREADS]))
