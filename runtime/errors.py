"""What a user can get wrong when loading or running a model."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """One sentence: the file, key or tensor, what was expected, what was found and what to do.

    Commands print it without a traceback and exit with 2.
    """


def meant(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of a sentence on an unknown word: "did you mean NEAREST?", or `otherwise` where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


@contextmanager
def fault_of(where: str, what: str) -> Iterator[None]:
    """Turns what a library raises over somebody's file into a UserError "WHERE: WHAT (what it was)".

    Such libraries index, compare and unpack what a file says without looking at it, so that any class can come of it.
    Raises UserError; MemoryError and UserError pass as they are.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"{where}: {what} ({type(error).__name__}: {why})") from error


class OutOfPages(UserError):  # noqa: N818 (a state to act on, by preempting a request, as much as a mistake)
    """A paged cache has too few pages for what is to be stored; it is as it was before."""

    def __init__(self, lacking: int, size: int):
        """`lacking` pages of `size` tokens."""
        super().__init__(
            f"the cache lacks {lacking} pages of {size} tokens, all others are in use;"
            " give it more pages or run fewer requests at once"
        )
