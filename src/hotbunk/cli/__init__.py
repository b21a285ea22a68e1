"""The command line. Every command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hotbunk.conformance.command import conformance

app = typer.Typer(
    name="hotbunk",
    help="One bunk, two crews: an RL trainer and a rollout engine take turns on the same memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version."""
    from hotbunk import __version__

    typer.echo(__version__)


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings, e.g. out=runs/a steps=50 seed=2 task=arithmetic, or resume=DIR.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the configuration and do nothing.")
    ] = False,
) -> None:
    """Train a policy while the engine sleeps and wakes around every step (trainer=grpo, or ppo with
    a critic), or generates beside it (trainer=grpo_async).

    Without arguments: a tiny model learns to copy digits in about a minute. Groups to choose
    from: preset (tiny, smollm2), rollout, transport, trainer, task, judge.
    """
    from hotbunk.cli.train import run

    run(overrides or [], show=show)


app.command("conformance")(conformance)


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")],
    backend: Annotated[str, typer.Option(help="The engine that serves.")] = "reference",
    preset: Annotated[
        str | None, typer.Option(help="tiny (an untrained model), or smollm2.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model directory.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    dev: Annotated[
        bool, typer.Option("--dev", help="Control endpoints without a key, on loopback only.")
    ] = False,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys, one a line. Control endpoints exist, and a key is needed."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="KV of one prompt serves others (default: the engine's own; reference: off).",
        ),
    ] = None,
    enable_prompt_tokens_details: Annotated[
        bool, typer.Option("--enable-prompt-tokens-details", help="Tell usage's cached tokens.")
    ] = False,
    strict_model: Annotated[
        bool, typer.Option("--strict-model", help="404 for any model name but its own.")
    ] = False,
    data_parallel: Annotated[int, typer.Option(min=1, help="Ranks, each a process.")] = 1,
    allowed_root: Annotated[
        list[Path] | None,
        typer.Option(help="Weights may be named by path under it; may be repeated."),
    ] = None,
    hold_deadline: Annotated[
        float, typer.Option(min=0, help="Seconds a held or frozen request waits.")
    ] = 600.0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the engine."),
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's endpoints, and vLLM's control plane.

    SIGTERM ends it: requests in flight end with a retryable abort, and it exits with 0.
    """
    from hotbunk.cli.serve import Options, run

    sys.exit(
        run(
            Options(
                backend=backend,
                preset=preset,
                model=model,
                host=host,
                port=port,
                dev=dev,
                api_key_file=api_key_file,
                enable_prefix_caching=enable_prefix_caching,
                enable_prompt_tokens_details=enable_prompt_tokens_details,
                strict_model=strict_model,
                data_parallel=data_parallel,
                allowed_root=allowed_root or [],
                hold_deadline=hold_deadline,
                settings=settings or [],
            )
        )
    )


@app.command()
def bench(
    name: Annotated[
        str, typer.Argument(help="Which one: dip, kernels, manager, pool, sync or vllm.")
    ],
    json: Annotated[Path | None, typer.Option(help="The file to write the rows into.")] = None,
    md: Annotated[
        Path | None,
        typer.Option(help="A document, such as docs/benchmarks.md, to put the table into."),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(help="manager: an interpreter that has verl, for its manager as the peer."),
    ] = None,
) -> None:
    """Measure against others doing the same work, and against the machine's limit."""
    from hotbunk.cli.bench import run

    run(name, json=json, md=md, peer_python=peer_python)


@app.command("sync-drill")
def sync_drill(
    faults: Annotated[int, typer.Option(help="How many faults, one a sync.")] = 30,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    transport: Annotated[
        list[str] | None, typer.Option(help="Over which transports; default: all there are.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas, each in a process of its own.")] = 2,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks of each replica.")] = 1,
    only: Annotated[int | None, typer.Option(help="Only the fault of that number.")] = None,
    json: Annotated[Path | None, typer.Option(help="The file to write the rounds into.")] = None,
) -> None:
    """Break syncs between processes in random places, and check what the contract promises.

    0: every promise held. 1: one did not; the same arguments with --only N show it again.
    """
    from hotbunk.cli.sync_drill import run

    sys.exit(
        run(
            faults=faults,
            seed=seed,
            transports=transport or [],
            replicas=replicas,
            ranks=ranks,
            only=only,
            json=json,
        )
    )


@app.command()
def plan(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as `hotbunk train` takes them."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model directory; its config.json is enough.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="The device's, such as 80GiB; default: what is free here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Say what memory a run will need, phase by phase, and what to change where it does not fit.

    0: it fits. 1: it does not.
    """
    from hotbunk.cli.plan import run

    sys.exit(run(overrides or [], model=model, memory=memory, json=json))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="A JSON list of findings.")] = False,
) -> None:
    """Say what works on this machine: drivers, kernels, backends, transports; and what would help."""
    from hotbunk.cli.doctor import run

    run(json=json)


def main() -> None:
    """The entry point: typed errors become one sentence and an exit code.

    2: what was asked for cannot be meant. 1: it failed. 130: interrupted.
    """
    # Before torch is loaded: waiting OpenMP threads must sleep, or they starve the other crew.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from hotbunk.rollout.errors import HotbunkError, UsageError

    try:
        app()
    except UsageError as error:
        _say(error)
        sys.exit(2)
    except HotbunkError as error:
        _say(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: Exception) -> None:
    typer.secho(f"hotbunk: {error}", err=True, fg=typer.colors.RED)
