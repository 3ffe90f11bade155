"""What all commands share: how a user's mistake ends them."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from runtime.devices import explained
from runtime.errors import UserError


@contextmanager
def without_traceback() -> Iterator[None]:
    """Ends the command with the sentence of a UserError and exit code 2, or with 130 on Ctrl-C.

    What a GPU refuses in the middle of the work (memory, most of all) is told in one sentence, too.
    """
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        meant = explained(error)
        if meant is None:
            raise
        typer.echo(f"error: {meant}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
