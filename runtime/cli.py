"""What commands share, on this floor and those above: how they end errors, and options as dataclasses."""

import os
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from io import TextIOWrapper
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import typer

from runtime.devices import explained
from runtime.errors import UserError

Options = TypeVar("Options")
# An error so many seconds after Ctrl-C is what a library made of it.
_JUST_NOW = 1.0


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

    A sentence is told for a user's mistake, for a file that cannot be read or written, for memory that ran out, for
    what a GPU refuses in the middle of the work, and for what Python and libraries raise of names and texts that no
    file can have (`_FAULTS`). Notes added to the exception (what is kept of the work) follow it. Any other error is
    ours and keeps its traceback. Characters that the terminal's encoding lacks are replaced; a reader of standard
    output that went away, such as `head`, ends the command in silence.

    user_errors  the classes of a user's mistakes on the command's floor.
    stopped      what else to say after Ctrl-C.
    """
    if sys.stdout is None:
        # Closed by the caller (`>&-`), who wants none of it.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with interrupts_wait_for_imports():
            yield
        sys.stdout.flush()
    except (typer.Exit, typer.Abort):
        raise  # typer's own ways to end
    except BrokenPipeError:
        _flush_or_discard()
        raise typer.Exit from None
    except KeyboardInterrupt as error:
        if stopped:
            error.add_note(stopped)
        _end("stopped by Ctrl-C", error, 130)
    except user_errors as error:
        _end(str(error), error)
    except OSError as error:
        _flush_or_discard()
        reason = error.strerror or error
        _end(f"{error.filename or 'a file'} cannot be used ({reason}): check it and its permissions", error)
    except BaseException as error:
        fault = next((told for kind, part, told in _FAULTS if isinstance(error, kind) and part in str(error)), None)
        sentence: object = fault or _refused(error)
        if sentence is None and isinstance(error, RuntimeError):
            sentence = explained(error)
        if sentence is None:
            raise
        _end(str(sentence), error)


@contextmanager
def interrupts_wait_for_imports() -> Iterator[None]:
    """Holds Ctrl-C back while a module is being imported: torch aborts, transformers says that its install is broken.

    What a library makes of Ctrl-C that it was stopped by, such as a file that cannot be read, is Ctrl-C again. Nothing
    changes off the main thread, or where somebody else handles the signal.
    """
    heard = -_JUST_NOW

    def interrupt(_number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if any(one.f_code.co_filename.startswith("<frozen importlib") for one, _ in walk_stack(frame)):
            threading.Timer(0.05, _interrupt).start()
            return
        heard = time.monotonic()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if time.monotonic() - heard < _JUST_NOW:
            raise KeyboardInterrupt from error
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    """Ctrl-C again. A real signal, where there is one for a thread: it also ends what the main thread waits in."""
    if sys.platform == "win32":
        interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# What names and texts that no file can have come to, deep in Python or a library: class, part of its message, sentence.
_HALF = "a name or text holds half a character (a lone surrogate), which is no Unicode: correct it"
_FULL = "this machine is out of memory: take a smaller model or fewer tokens at once, or end what else runs here"
_FAULTS: tuple[tuple[type[Exception], str, str], ...] = (
    (MemoryError, "", _FULL),
    (Exception, "DefaultCPUAllocator", _FULL),
    (UnicodeEncodeError, "surrogates not allowed", _HALF),
    (TypeError, "TextEncodeInput", _HALF),
    (ValueError, "embedded null byte", "a file name holds a NUL, which no file system takes: correct it"),
    (ValueError, "has an empty name", "the path has no name of its own, such as / or .: give one below it"),
    (ValueError, "integer string conversion", "a number of more than 4,300 digits stands in a file: correct it"),
    (RuntimeError, "home directory", "a path begins with ~NAME, and there is no such user: give the whole path"),
    (RuntimeError, "Symlink loop", "a path leads through links that go round in a loop: remove one of them"),
    (RecursionError, "decoding a JSON", "a file is nested too deeply to be read: correct it"),
)


def _refused(error: BaseException) -> str | None:
    """The sentence for what `tokenizers` says of a text that its file's parts cannot handle, or breaks off over it.

    The library raises plain Exception, and PyO3's PanicException, which is no Exception; nothing of ours does.
    """
    if type(error) is not Exception and type(error).__name__ != "PanicException":
        return None
    why = " ".join(str(error).split())[:300].rstrip(".")
    return f"the model's tokenizer.json does not fit together ({why}): put a sound one beside the weights"


def _flush_or_discard() -> None:
    """Leaves nothing for Python to write when it ends, which it would complain about once more."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _end(sentence: str, error: BaseException, code: int = 2) -> None:
    parts = [" ".join(sentence.split()), *getattr(error, "__notes__", [])]
    typer.echo(f"error: {'; '.join(parts)}", err=True)
    raise typer.Exit(code) from None
