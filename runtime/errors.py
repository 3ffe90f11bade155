"""What a user can get wrong when loading or running a model."""


class UserError(Exception):
    """One sentence: the file, key or tensor, what was expected, what was found and what to do.

    Commands print it without a traceback and exit with 2.
    """


class OutOfPages(UserError):  # noqa: N818 (a state to act on, by preempting a request, as much as a mistake)
    """A paged cache has too few pages for what is to be stored; it is as it was before."""

    def __init__(self, lacking: int, size: int):
        """`lacking` pages of `size` tokens."""
        super().__init__(
            f"the cache lacks {lacking} pages of {size} tokens, all others are in use;"
            " give it more pages or run fewer requests at once"
        )
