"""The target's forward of a round, on the host or on a device, where the drafts may still be on their way."""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.contract import Cache, Decoder, Out
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


def run_forward(
    decoder: Decoder,
    on_device: DeviceRounds | None,
    cache: Cache,
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    deferred: DeferredRound | None,
    rule: Rule,
) -> Forwarded:
    """Runs the target over a round's rows; on_device: the decoder, if it chooses tokens on its device.

    Raises ForwardError.
    """
    tokens, rows, logits_at = forward_rows(batch, drafts)
    try:
        if deferred is not None:
            out = deferred.forward(tokens, rows, cache, logits_at)
            return Forwarded(out, *deferred.choose(row_samplings(batch, drafts, rule), out.logits))
        out = decoder.forward(tokens, rows, cache, logits_at)
        if on_device is None:
            return Forwarded(out, finite_argmax(out.logits), [])
        return Forwarded(out, *on_device.next_tokens(out.logits, row_samplings(batch, drafts, rule)))
    except Exception as error:
        raise ForwardError(error) from error
