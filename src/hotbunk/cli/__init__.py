"""The command line."""

import typer

import hotbunk

app = typer.Typer(name="hotbunk", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    """RL rollout backends that sleep, wake and take new weights."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(hotbunk.__version__)


def main() -> None:
    """Entry point of the `hotbunk` script."""
    app()
