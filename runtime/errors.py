"""What a user can get wrong when loading or running a model."""


class UserError(Exception):
    """One sentence: the file, key or tensor, what was expected, what was found and what to do.

    Commands print it without a traceback and exit with 2.
    """
