"""What a user may ask for."""

import math
from typing import Any

import pytest

from compress.best.budgets import Budgets
from compress.errors import UserError

NOTHING: dict[str, Any] = dict.fromkeys(("quality", "kl", "disk", "memory", "latency", "ttft"))


def parse(goal: str = "speed", **asked: Any) -> Budgets:
    return Budgets.parse(**{**NOTHING, **asked}, goal=goal)


def test_budgets_are_read_in_the_units_that_people_write() -> None:
    found = parse(quality="1%", disk="2MB", memory="1 GiB", latency=3.5)
    assert found == Budgets(0.01, None, 2_000_000, 1 << 30, 3.5)
    assert found.figure_limit == pytest.approx(math.log(1.01)) and found.shown(math.log(1.02)) == "perplexity +2.00 %"
    assert parse(quality="0.02").quality == 0.02
    by_kl = parse(kl=0.05)
    assert by_kl.figure_limit == 0.05 and by_kl.shown(0.05) == "KL 0.0500 nats"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quality": "much"}, "--quality: expected a growth"),
        ({"quality": "0%"}, "--quality: expected a growth"),
        ({"quality": "1%", "kl": 0.1}, "found both"),
        ({"kl": -1.0}, "--kl: expected a number above 0"),
        ({"kl": 0.1, "latency": math.nan}, "--latency: expected a number above 0"),
        ({"kl": 0.1, "disk": "big"}, "--disk: expected a size"),
        ({"kl": 0.1, "memory": "0GB"}, "--memory: expected a size"),
        ({"disk": "1GB"}, "expected --quality or --kl"),
        ({"disk": "1GB", "goal": "beauty"}, "--for: expected speed"),
        ({"quality": "1%", "goal": "quality"}, "without them the original is best"),
    ],
)
def test_what_is_no_question_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(**asked)
