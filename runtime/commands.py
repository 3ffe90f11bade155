"""What all commands share: how a user's mistake ends them."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from runtime.errors import UserError


@contextmanager
def without_traceback() -> Iterator[None]:
    """Ends the command with the sentence of a UserError and exit code 2, or with 130 on Ctrl-C."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
