"""Regular expressions over the names of layers, as recipes and model files have them: none may search for ever."""

import re
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]  # the only reader of the syntax there is
from typing import Any

# Ways to match that a search may have to try, and how often a repeat is taken to repeat in one name.
_MOST_WAYS, _LONGEST = 200_000_000, 64


@lru_cache(maxsize=1024)  # asked for every layer of a model, the thousands of a mixture's experts too
def trouble(pattern: str) -> str | None:
    """Why an expression cannot be searched in names: no expression, or with too many ways to match; None: it can."""
    try:
        re.compile(pattern)
        ways = _ways(_parser.parse(pattern))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    if ways > _MOST_WAYS:
        return "it could take for ever: take fewer repeats, and none of a group that repeats or offers a choice itself"
    return None


def _ways(parsed: Any) -> int:
    """A bound on the ways in which a parsed expression can match at one place of a name."""
    ways = 1
    for kind, value in parsed:
        if kind is _constants.BRANCH:
            ways *= sum(map(_ways, value[1]))
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            least, most, inner = value
            most = min(int(most), _LONGEST)
            ways *= max(1, most - least + 1) * _ways(inner) ** max(1, most)
        elif kind in (_constants.SUBPATTERN, _constants.ASSERT, _constants.ASSERT_NOT, _constants.GROUPREF_EXISTS):
            for part in value if isinstance(value, tuple) else ():
                ways *= _ways(part) if isinstance(part, _parser.SubPattern) else 1
        elif kind is _constants.ATOMIC_GROUP:
            ways *= _ways(value)
        ways = min(ways, _MOST_WAYS + 1)
    return ways
