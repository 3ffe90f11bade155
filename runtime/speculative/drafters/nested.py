"""Self-speculation: an int8 target drafts with the upper four bits of its own weights.

The draft reads half of the target's bytes and needs no second model and no weight memory; it keeps keys and values of
its own, which its coarser weights make.
"""

from types import SimpleNamespace

from runtime.contract import Decoder, HasDecoder
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.verify import Rule


class NestedDrafter(ModelDrafter):
    """Drafts token by token on the upper planes of the target's int8 weights.

    target  what `runtime.load(path, planes=True)` returned.
    verify  the rule that will verify, as ModelDrafter takes it.

    Raises UserError for a target that was loaded otherwise, or that transformers runs.
    """

    name = "nested"

    def __init__(self, target: HasDecoder, verify: Rule = "coupled") -> None:
        super().__init__(SimpleNamespace(decoder=upper_half(target)), verify)


def upper_half(target: HasDecoder) -> Decoder:
    """The target's decoder on the upper planes of its int8 weights. Raises UserError as NestedDrafter does."""
    decoder = target.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError(
            f"nested drafts on Specpress' own kernels, and {decoder.kernels} run this target; use another drafter"
        )
    return decoder.upper()
