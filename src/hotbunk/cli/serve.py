"""``hotbunk serve``: an engine in a process of its own, behind HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from hotbunk.rollout import process, registry
from hotbunk.rollout.calls import abandoned
from hotbunk.rollout.contract import Manifest, UpdateReport, Version
from hotbunk.rollout.errors import ConfigError, HotbunkError, MissingExtra
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.options import parse_settings
from hotbunk.rollout.process import ReplicaSpec
from hotbunk.rollout.status import Deadlines
from hotbunk.trainer_hooks.recipes.smollm2 import cache_root, ensure_smollm2
from hotbunk.trainer_hooks.recipes.tokenizer import load_tokenizer

PRESETS = ("tiny", "smollm2")
# What a served engine is told where the command line is silent; else its own defaults hold.
ENGINE_DEFAULTS: dict[str, dict[str, Any]] = {"reference": {"enable_prefix_caching": False}}
ROOTS_VARIABLE = "HOTBUNK_DISK_ROOTS"
LOAD_SECONDS = 600.0
# At scale 1 an untrained model says the same whatever its weights are.
TINY = {"hidden": 128, "layers": 2, "context": 1024, "scale": 4.0, "seed": 0}


class Options(msgspec.Struct, frozen=True):
    """The command line, understood; see :func:`hotbunk.cli.serve`."""

    backend: str
    preset: str | None
    model: Path | None
    host: str
    port: int
    dev: bool
    api_key_file: Path | None
    enable_prefix_caching: bool | None
    enable_prompt_tokens_details: bool
    strict_model: bool
    data_parallel: int
    allowed_root: Sequence[Path]
    hold_deadline: float
    settings: Sequence[str]


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    :raises UsageError: what was asked for cannot be meant; nothing was started.
    """
    return asyncio.run(_serve(options))


async def _serve(options: Options) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):  # the server takes over once it is there
        loop.add_signal_handler(kind, stop.set)
    serving = asyncio.create_task(_until_ended(options))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        await abandoned(serving)
        return 0
    serving.result()
    return 0


async def _until_ended(options: Options) -> None:
    try:
        from hotbunk.rollout.server.app import create_app
        from hotbunk.rollout.server.running import bind, make_server
        from hotbunk.rollout.server.settings import LOOPBACK, Settings, read_keys
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hotbunk"):
            raise
        raise MissingExtra(
            f"serve needs the package {error.name!r}, which is not installed",
            remedy="pip install 'hotbunk[server]'",
        ) from error

    keys = read_keys(options.api_key_file) if options.api_key_file else ()
    if options.dev and not keys and options.host not in LOOPBACK:
        raise ConfigError(
            f"--dev without a key is for loopback, not {options.host}",
            remedy="add --api-key-file, or leave --host out",
        )
    registry.find(registry.BACKENDS, options.backend)
    sock = bind(options.host, options.port)
    try:
        model = _model(options)
        engine = _engine(options, model)
        roots = tuple(_root(path) for path in (model, *options.allowed_root))
        name = options.preset or model.name
        settings = Settings(
            model=name,
            context=_context(model, engine),
            model_dir=roots[0],
            control=bool(options.dev or keys),
            keys=keys,
            strict_model=options.strict_model,
            prompt_tokens_details=options.enable_prompt_tokens_details,
            allowed_roots=roots,
        )
        tokenizer = load_tokenizer(model)
        handle = await process.start(_spec(options, engine, roots))
        try:
            app = create_app(handle, tokenizer, settings, load_directory)
            control = "with a key" if keys else "dev" if options.dev else "none"
            host, port = sock.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            server = make_server(
                app,
                lambda: typer.echo(
                    f"hotbunk: serving {name} at http://{shown}:{port} (control: {control})"
                ),
            )
            await server.serve([sock])
            if settings.control:
                await app.state.session.close()
        finally:
            await handle.close()
            process.shutdown()
    finally:
        sock.close()


def _engine(options: Options, model: Path) -> dict[str, Any]:
    """The backend's options. Whatever is served takes ``model``, a directory."""
    given = parse_settings(options.settings)
    if "model" in given:
        raise ConfigError("--set model= is --model's to say")
    flags = {"enable_prefix_caching": options.enable_prefix_caching}
    asked = {name: value for name, value in flags.items() if value is not None}
    return {**ENGINE_DEFAULTS.get(options.backend, {}), **asked, **given, "model": str(model)}


def _spec(options: Options, engine: dict[str, Any], roots: Sequence[Path]) -> ReplicaSpec:
    return ReplicaSpec(
        options.backend,
        engine,
        name="server",
        deadlines=Deadlines(hold=options.hold_deadline),
        data_parallel=options.data_parallel,
        # Published sets, too, are read from these roots only, whatever a ticket says.
        env={ROOTS_VARIABLE: os.pathsep.join(map(str, roots))},
    )


def _root(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_dir():
        raise ConfigError(f"--allowed-root {path} is no directory")
    return real


def _model(options: Options) -> Path:
    if (options.preset is None) == (options.model is None):
        raise ConfigError("one of --preset and --model is needed")
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            raise ConfigError(f"--model {options.model} has no config.json")
        return options.model.resolve()
    if options.preset not in PRESETS:
        raise ConfigError(f"no preset {options.preset!r}", remedy=f"there are {list(PRESETS)}")
    return ensure_smollm2() if options.preset == "smollm2" else ensure_tiny()


def ensure_tiny(cache_dir: Path | None = None) -> Path:
    """The untrained model behind ``--preset tiny``, made at the first call; always the same.

    :raises ConfigError: the cache cannot be written.
    """
    models = cache_root(cache_dir) / "models"
    target = models / "tiny-1"
    if target.is_dir():
        return target
    from hotbunk.trainer_hooks.recipes.models import build_tiny

    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / ".tiny-1.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                for left in models.glob(".tiny-1-*"):  # by one that was killed
                    shutil.rmtree(left)
                scratch = Path(tempfile.mkdtemp(dir=models, prefix=".tiny-1-"))
                build_tiny(scratch, **TINY)  # type: ignore[arg-type]
                scratch.rename(target)
    except OSError as error:
        raise ConfigError(f"the tiny model cannot be written to {models}: {error}") from error
    return target


def _context(model: Path, engine: dict[str, Any]) -> int:
    """Tokens a sequence may have: the model's, or less where the engine is told so."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
        config = config.get("text_config", config)
        own = int(config["max_position_embeddings"])
        return min(own, int(engine.get("max_model_len") or own))
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{model / 'config.json'} cannot be used: {error}") from error


async def load_directory(handle: ReplicaHandle, path: Path, version: Version) -> UpdateReport:
    """Update a replica on this host from a directory of safetensors files.

    :raises HotbunkError: what the directory lacks, or what the update raises.
    """
    from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
    from hotbunk.checkpoint_engine.transports.shm import ShmTransport

    source = await asyncio.to_thread(SafetensorsSource, path)
    manifest = Manifest(version, await asyncio.to_thread(source.specs), fingerprint=KIND)
    transport = ShmTransport()
    try:
        ranks = (handle.capabilities.ranks,)
        offer = await transport.offer(source, manifest, ranks=ranks, deadline=LOAD_SECONDS)
        serving = asyncio.create_task(offer.serve())
        try:
            [ticket] = offer.tickets
            updating = asyncio.ensure_future(handle.update_weights(ticket, version=version))
            try:
                report = await updating
            except HotbunkError:
                await offer.drop(0)
                raise
            await serving
            return report
        finally:
            await abandoned(serving)
            await offer.close()
    finally:
        await transport.close()
