"""What a user can get wrong when naming text for calibration or evaluation."""


class UserError(Exception):
    """One sentence: the file, line or name, what was expected, what was found and what to do.

    Commands print it without a traceback and exit with 2.
    """
