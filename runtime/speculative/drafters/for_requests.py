"""The drafters that any request may name: those that need no model, beside an engine's own."""

from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.prediction import PredictionDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter


def request_drafters(default: Drafter) -> dict[str, Drafter]:
    """Drafters by name for an engine: `default`, which is the first, then lookup, suffix and prediction.

    Requests that name none get the default; "none" and "grammar" are the engine's own.
    """
    found = {default.name: default}
    for drafter in (LookupDrafter(), SuffixDrafter(), PredictionDrafter()):
        found.setdefault(drafter.name, drafter)
    return found
