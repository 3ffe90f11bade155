"""What a user can get wrong when compressing a model, and every floor's errors of that kind."""

from calib.errors import UserError as CalibError
from runtime.errors import UserError as RuntimeFloorError


class UserError(Exception):
    """One sentence: the file, key or tensor, what was expected, what was found and what to do.

    Commands print it without a traceback and exit with 2.
    """


USER_ERRORS: tuple[type[Exception], ...] = (UserError, CalibError, RuntimeFloorError)
