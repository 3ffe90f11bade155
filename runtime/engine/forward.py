"""The target's forward of a round, on the host or on a device, where the drafts may still be on their way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import empty

from runtime.contract import Cache, Decoder, GreedyRows, Out, integers
from runtime.engine.deferred import DeferredRound
from runtime.engine.round import ScheduledRequest, forward_rows, row_samplings
from runtime.model.on_device import DeviceRounds
from runtime.sampling.distribution import finite_argmax
from runtime.speculative.draft import Draft, Rule


class ForwardError(Exception):
    """The target's forward has raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Forwarded(NamedTuple):
    """What a forward gave.

    tokens  the target's at each row of logits: the device's sample or the argmax, NON_FINITE where they are no numbers.
    drafts  the tokens of a deferred round's drafts.
    """

    out: Out
    tokens: list[int]
    drafts: list[list[int]]


# The logits of a forward that tells the most probable tokens alone.
_UNSEEN = empty((0, 0))


@dataclass(frozen=True, eq=False)
class Target:
    """What forwards run on.

    on_device  the decoder, if it chooses tokens on its device; greedy: if it can tell the most probable ones alone.
    """

    decoder: Decoder
    cache: Cache
    on_device: DeviceRounds | None
    greedy: GreedyRows | None

    @staticmethod
    def of(decoder: Decoder, cache: Cache) -> "Target":
        """Made once: to compare a decoder with a protocol takes as long as a twentieth of a small model's forward."""
        on_device = decoder if isinstance(decoder, DeviceRounds) else None
        return Target(decoder, cache, on_device, decoder if isinstance(decoder, GreedyRows) else None)


def run_forward(
    target: Target,
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    deferred: DeferredRound | None,
    rule: Rule,
) -> Forwarded:
    """Runs the target over a round's rows. Raises ForwardError."""
    fed, rows, at = forward_rows(batch, drafts)
    cache, on_device, greedy = target.cache, target.on_device, target.greedy
    try:
        if greedy is not None and all(part.state.greedy for part in batch):
            chosen = greedy.forward_greedy(fed, rows, cache, at)
            return Forwarded(Out(_UNSEEN, chosen.hidden, chosen.taken), chosen.tokens, [])
        tokens, logits_at = integers(fed), None if at is None else integers(at)
        if deferred is not None:
            out = deferred.forward(tokens, rows, cache, logits_at)
            return Forwarded(out, *deferred.choose(row_samplings(batch, drafts, rule), out.logits))
        out = target.decoder.forward(tokens, rows, cache, logits_at)
        if on_device is None:
            return Forwarded(out, finite_argmax(out.logits), [])
        return Forwarded(out, *on_device.next_tokens(out.logits, row_samplings(batch, drafts, rule)))
    except Exception as error:
        raise ForwardError(error) from error
