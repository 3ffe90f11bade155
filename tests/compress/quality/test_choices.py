from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from compress.errors import UserError
from compress.quality import scoring
from compress.quality.choices import MOST_TOKENS, OPTIONS, Choice, line_breaks, make_choices
from compress.quality.flips import flips, lengths
from compress.quality.scoring import score
from runtime import load
from runtime.contract import Decoder, Out, Rows
from runtime.model.hf_adapter import adapt

BREAKS = (7, 8)


def text(count: int = 3, length: int = 190, seed: int = 3) -> torch.Tensor:
    """Windows with a break at every sixth token or so."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(9, 300, (count, length), generator=generator)
    ends = torch.rand(count, length, generator=generator) < 1 / 6
    return torch.where(ends, torch.randint(7, 9, (count, length), generator=generator), tokens)


def test_a_choice_is_the_true_line_and_three_others_that_follow_the_same_token() -> None:
    windows, documents = text(), [0, 1, 0]
    choices = make_choices(windows, documents, BREAKS, 40, seed=5)
    assert len(choices) == 40 and len({(one.window, one.at) for one in choices}) == 40
    for one in choices:
        tokens = windows[one.window].tolist()
        true, *others = one.options
        assert tuple(tokens[one.at + 1 : one.at + 1 + len(true)]) == true
        assert len({true, *others}) == OPTIONS and all(2 <= len(line) <= MOST_TOKENS for line in one.options)
        for line in others:
            # It stands behind the same token somewhere in the same document.
            begun = (tokens[one.at], *line)
            mine = [windows[i].tolist() for i, owner in enumerate(documents) if owner == documents[one.window]]
            assert any(
                tuple(other[at : at + len(begun)]) == begun for other in mine for at in range(len(other) - len(begun))
            )


def test_choices_are_drawn_by_their_seed() -> None:
    windows = text()
    first = make_choices(windows, [0, 0, 0], BREAKS, 30, seed=1)
    assert make_choices(windows, [0, 0, 0], BREAKS, 30, seed=1) == first
    other = make_choices(windows, [0, 0, 0], BREAKS, 30, seed=2)
    assert [one.at for one in other] == [one.at for one in first] and other != first
    assert make_choices(windows, [0, 0, 0], (), 30, seed=1) == []


def test_line_breaks_are_found_by_what_tokens_stand_for() -> None:
    assert line_breaks(torch.tensor([[1, 4], [4, 2]]), lambda ids: {1: "a", 2: ")\n", 4: "\n  "}[ids[0]]) == {2, 4}


def one_by_one(decoder: Decoder, windows: torch.Tensor, choices: list[Choice]) -> np.ndarray:
    """Every option read as a text of its own."""
    found = np.zeros((len(choices), OPTIONS))
    for number, choice in enumerate(choices):
        begun = windows[choice.window, : choice.at + 1].tolist()
        for option, line in enumerate(choice.options):
            cache = decoder.new_cache()
            tokens = torch.tensor([*begun, *line])
            rows = Rows.chains([(cache.open(len(tokens)), 0, len(tokens))])
            log_p = decoder.forward(tokens, rows, cache).logits.double().log_softmax(-1)
            found[number, option] = sum(float(log_p[len(begun) - 1 + i, token]) for i, token in enumerate(line))
    return found


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_scores_are_those_of_each_option_read_alone(tiny: Callable[..., Path], kind: str) -> None:
    windows = text(count=2)
    choices = make_choices(windows, [0, 0], BREAKS, 24, seed=1)
    model = load(tiny(kind))
    expected = one_by_one(model.decoder, windows, choices)
    steps: list[tuple[int, int]] = []
    found = score(model.decoder, windows, choices, on_step=lambda *step: steps.append(step))
    assert found == pytest.approx(expected, abs=1e-5)
    assert steps[-1] == (len(steps), len(steps))
    # Through int8 keys and values other numbers come, but not far away.
    rounded = score(model.decoder, windows, choices, "int8")
    assert 0 < np.abs(rounded - found).max() < 0.5


def test_a_decoder_without_trees_gives_the_same(tiny: Callable[..., Path]) -> None:
    windows = text(count=2, seed=9)
    choices = make_choices(windows, [0, 1], BREAKS, 12, seed=1)
    path = tiny("llama")
    chains = adapt(path, AutoConfig.from_pretrained(path), torch.device("cpu"))
    assert score(chains, windows, choices) == pytest.approx(score(load(path).decoder, windows, choices), abs=1e-3)


def test_broken_logits_stop_it(tiny: Callable[..., Path]) -> None:
    decoder = load(tiny("llama")).decoder
    windows = text(count=1)

    class Broken:
        no_trees = ""

        def __getattr__(self, name: str) -> object:
            return getattr(decoder, name)

        def forward(self, *given: object) -> Out:
            out = decoder.forward(*given)
            return Out(torch.where(out.logits > out.logits.mean(), torch.nan, out.logits), out.hidden)

    choices = make_choices(windows, [0], BREAKS, 3, seed=1)
    with pytest.raises(UserError, match="expected finite logits"):
        scoring.score(Broken(), windows, choices)
    assert np.isfinite(scoring.score(decoder, windows, choices)).all()


def test_flips_count_both_directions() -> None:
    #             right    wrong 1   wrong 2       scores of four options, the first is true
    right, wrong, other = [-1.0, -5, -5, -5], [-9.0, -2, -5, -5], [-9.0, -5, -2, -5]
    original = np.array([right, right, right, wrong, wrong, wrong, wrong])
    compressed = np.array([right, wrong, other, right, wrong, other, other])
    found = flips(original, compressed, np.ones((7, 4)))
    assert (found.lost, found.won, found.changed) == (2, 1, 5)
    assert (found.original, found.compressed) == (pytest.approx(3 / 7), pytest.approx(2 / 7))
    # Per byte another option is the best: the true line is a long one.
    sizes = np.array([[20.0, 1, 1, 1]] * 7)
    assert flips(original, compressed, sizes).original == 1.0
    # An option as good as the true one is no right choice.
    assert flips(np.full((5, 4), -2.0), np.full((5, 4), -2.0), np.ones((5, 4))).original == 0


def test_lengths_are_bytes_of_the_options() -> None:
    choice = Choice(0, 40, ((1, 2), (3,), (4,), (5, 6)))
    sizes = {(1, 2): 7, (3,): 0, (4,): 3, (5, 6): 2}
    assert lengths([choice], sizes).tolist() == [[7, 1, 3, 2]]
