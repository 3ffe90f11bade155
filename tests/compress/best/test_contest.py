"""Which ways of decoding the finalists are timed in, and when a drafter wins."""

from compress.best.acceptance import Drafts
from compress.best.contest import Way, fastest, lengths, promising
from compress.best.costs import WIDTHS

FOUND = [("model", 0.5, 0.3), ("lookup", 0.4, 0.1), ("suffix+model", 0.6, 0.2), ("never", 0.01, 1.0)]


def test_a_long_draft_is_timed_with_half_of_it() -> None:
    assert lengths(1) == [None, 1]
    assert lengths(4) == [None, 4]
    assert lengths(7) == [None, 7, 4]
    assert lengths(8) == [None, 8, 4]


def test_the_end_of_a_faster_chain_is_not_timed_beside_it() -> None:
    forward = dict.fromkeys(WIDTHS, 2.0)
    drafts = [Drafts(name, (1.0,), (accepted,), cost) for name, accepted, cost in FOUND]
    found = [one.drafter for one in promising(forward, drafts, [0.0] * len(WIDTHS))]
    assert found == ["suffix+model", "lookup"]
    # Where the chain is the slower one, both are.
    drafts = [Drafts(name, (1.0,), (accepted,), 0.1) for name, accepted in (("model", 0.9), ("suffix+model", 0.8))]
    found = [one.drafter for one in promising(forward, drafts, [0.0] * len(WIDTHS))]
    assert found == ["model", "suffix+model"]


def test_a_drafter_must_gain_more_than_noise() -> None:
    ways = [Way("a", "none", 100.0), Way("a", "lookup", 100.5, 4), Way("b", "lookup", 900.0, 4), Way("b", "none", 90.0)]
    assert fastest(ways, "a") == ways[0]
    assert fastest(ways, "b") == ways[2]
