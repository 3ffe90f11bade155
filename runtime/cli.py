"""What commands share, on this floor and those above: how they end errors, and options as dataclasses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer

from runtime.devices import explained
from runtime.errors import UserError

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes a function of one dataclass a command whose options are its fields, and which ends errors as below.

    The fields are annotated as typer has it (`Annotated[int, typer.Option(help=…)]`); commands that share options
    share a base class, and what a user said is never packed again.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = []
    for field in fields(options):  # type: ignore[arg-type]  # a dataclass
        default = field.default if field.default_factory is MISSING else field.default_factory()
        kept = Parameter.empty if default is MISSING else default
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=kept, annotation=hints[field.name]))

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            with without_traceback():
                function(options(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = hints
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


@contextmanager
def without_traceback(user_errors: tuple[type[Exception], ...] = (UserError,), stopped: str = "") -> Iterator[None]:
    """Ends the command with `error: SENTENCE` on standard error and exit code 2, or 130 on Ctrl-C.

    A sentence is told for a user's mistake, for a file that cannot be read or written, for memory that ran out, and
    for what a GPU refuses in the middle of the work. Notes added to the exception (what is kept of the work) follow
    it. Any other error is ours and keeps its traceback.

    user_errors  the classes of a user's mistakes on the command's floor.
    stopped      what else to say after Ctrl-C.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise  # typer's own ways to end, and a reader such as `head` that went away: no mistakes
    except KeyboardInterrupt as error:
        if stopped:
            error.add_note(stopped)
        _end("stopped by Ctrl-C", error, 130)
    except user_errors as error:
        _end(str(error), error)
    except OSError as error:
        reason = error.strerror or error
        _end(f"{error.filename or 'a file'} cannot be used ({reason}): check it and its permissions", error)
    except (RuntimeError, MemoryError) as error:
        sentence = _memory(error) or explained(error)
        if sentence is None:
            raise
        _end(str(sentence), error)


def _memory(error: Exception) -> str | None:
    """The sentence for main memory that ran out; None for other errors."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "this machine is out of memory: take a smaller model or fewer tokens at once, or end what else runs here"
    return None


def _end(sentence: str, error: BaseException, code: int = 2) -> None:
    parts = [" ".join(sentence.split()), *getattr(error, "__notes__", [])]
    typer.echo(f"error: {'; '.join(parts)}", err=True)
    raise typer.Exit(code) from None
