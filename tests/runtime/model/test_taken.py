"""The residual stream that decoders give to those who ask: transformers' values, and the same bits at every width."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime import load
from runtime.contract import Rows, TakesStates
from runtime.model.base import BaseDecoder

Tiny = Callable[..., Path]
Text = Callable[..., torch.Tensor]


def taken(decoder: BaseDecoder, tokens: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Of a chain that is read in pieces."""
    cache, found, start = decoder.new_cache(), [], 0
    handle = cache.open(len(tokens))
    for count in pieces:
        rows = Rows.chains([(handle, start, count)])
        out = decoder.forward(tokens[start : start + count], rows, cache, torch.tensor([count - 1]))
        assert out.taken is not None and len(out.logits) == 1
        found.append(out.taken.cpu())
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["llama", "gemma", "mixtral"])
def test_streams_are_those_of_transformers(tiny: Tiny, text: Text, kernels: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens, decoder = text(37), load(tiny(kind), kernels=kernels).decoder
    assert isinstance(decoder, TakesStates) and isinstance(decoder, BaseDecoder)
    model = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    states = model(tokens[None], output_hidden_states=True).hidden_states
    found = taken(decoder.tapped((1, 0)), tokens, [37]).chunk(2, dim=1)
    assert torch.allclose(found[0], states[1][0], atol=2e-4) and torch.allclose(found[1], states[0][0], atol=1e-5)
    # The last one there is before the final norm.
    last = taken(decoder.tapped((decoder.layers,)), tokens, [37])
    assert not torch.allclose(last, states[-1][0], atol=1e-2)
    cache = decoder.new_cache()
    whole = decoder.forward(tokens, Rows.chains([(cache.open(37), 0, 37)]), cache)
    assert whole.taken is None
    assert torch.allclose(model.lm_head(model.model.norm(last)), whole.logits, atol=2e-3)


def test_streams_are_the_same_bits_in_pieces_and_trees(tiny: Tiny, text: Text, kernels: str) -> None:
    tokens, decoder = text(60), load(tiny("llama"), kernels=kernels).decoder
    assert isinstance(decoder, BaseDecoder)
    view = decoder.tapped((0, 2, 1))
    assert view is decoder.tapped((0, 2, 1)) and view.tapped((0, 2, 1)) is view and decoder.taps == ()
    once = taken(view, tokens, [60])
    assert torch.equal(once, taken(view, tokens, [1, 7, 50, 2]))
    # A tree after 58 tokens: the row whose path is the text has its bits, the other branch has not. The cache is the
    # decoder's own, as engines share it.
    cache = decoder.new_cache()
    handle = cache.open(61)
    decoder.forward(tokens[:58], Rows.chains([(handle, 0, 58)]), cache)
    other = (tokens[58] + 1) % decoder.vocab_size
    rows = Rows(*(torch.tensor(part) for part in ([handle] * 3, [58, 58, 59], [-1, -1, 1])))
    out = view.forward(torch.stack([other, tokens[58], tokens[59]]), rows, cache)
    assert out.taken is not None
    assert torch.equal(out.taken[1:], once[58:]) and not torch.equal(out.taken[0], once[58])
    empty = torch.empty(0, dtype=torch.int64)
    nothing = view.forward(empty, Rows(empty, empty, empty), cache).taken
    assert nothing is not None and nothing.shape == (0, 3 * decoder.hidden_size)


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 1)])
def test_places_that_are_none(tiny: Tiny, kernels: str, taps: tuple[int, ...]) -> None:
    decoder = load(tiny("llama"), kernels=kernels).decoder
    assert isinstance(decoder, BaseDecoder)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        decoder.tapped(taps)
