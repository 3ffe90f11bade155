"""The target's forward of a round, on the host or on a device, where the drafts may still be on their way."""

from collections.abc import Sequence

from runtime.contract import Cache, Decoder, Out
from runtime.engine.deferred import DeferredRound
from runtime.engine.round import ScheduledRequest, finite_tokens, forward_rows, row_samplings
from runtime.model.on_device import DeviceRounds
from runtime.sampling.distribution import host
from runtime.speculative.draft import Draft, Rule


class ForwardError(Exception):
    """The target's forward has raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def run_forward(
    decoder: Decoder,
    on_device: DeviceRounds | None,
    cache: Cache,
    batch: Sequence[ScheduledRequest],
    drafts: Sequence[Draft],
    deferred: DeferredRound | None,
    rule: Rule,
) -> tuple[Out, list[int], list[list[int]]]:
    """The target's output; its token at each row of logits; and the tokens of a deferred round's drafts.

    on_device  the decoder, if it chooses tokens on its device.

    A token is the device's sample or the argmax, NON_FINITE where the row's logits are no numbers. Raises ForwardError.
    """
    tokens, rows, logits_at = forward_rows(batch, drafts)
    try:
        if deferred is not None:
            out = deferred.forward(tokens, rows, cache, logits_at)
            return out, *deferred.choose(row_samplings(batch, drafts, rule), out.logits)
        out = decoder.forward(tokens, rows, cache, logits_at)
        if on_device is None:
            return out, finite_tokens(host(out.logits)), []
        return out, *on_device.next_tokens(out.logits, row_samplings(batch, drafts, rule))
    except Exception as error:
        raise ForwardError(error) from error
