"""Models that transformers runs: what their caches can do is found out, and drafts are verified where that can be."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from runtime import Model, Speculator, load
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.by_name import drafter_by_name
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.compress.tiny_architectures import make

PROMPT = [5, 9, 17, 300, 41, 7, 88, 5, 9, 17, 300, 41]


@pytest.fixture
def adapted(tmp_path: Path) -> Callable[[str], Model]:
    """Makes a tiny random model of a type, and loads it through transformers, lfm2 as well."""

    def made(kind: str) -> Model:
        make(kind, tmp_path / kind)
        return load(tmp_path / kind, threads=1, adapter=True)

    return made


class Stubborn(LookupDrafter):
    """Drafts the last token again, and then two that are seldom right."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        return [
            Draft.chain([request.tokens[-1], 7, 300][:budget])
            for request, budget in zip(requests, budgets, strict=True)
        ]


def texts(model: Model, drafter: Any, count: int) -> Any:
    return Speculator(model, drafter, draft_length=3).generate([PROMPT], max_new_tokens=count, stop=())[0]


@pytest.mark.parametrize("kind", ["vaultgemma", "lfm2", "openai-gpt", "bloom"])
def test_drafts_are_verified_far_beyond_windows_and_convolutions(kind: str, adapted: Callable[[str], Model]) -> None:
    """vaultgemma's window is 64 tokens, lfm2's convolution 3: both come back as they were."""
    model = adapted(kind)
    count = 100 if kind == "vaultgemma" else 24
    plain, drafted = texts(model, None, count), texts(model, Stubborn(), count)
    assert plain.tokens == drafted.tokens
    assert drafted.metrics.drafted > 0 and drafted.metrics.accepted < drafted.metrics.drafted


def test_a_window_gives_back_what_it_has_kept_and_no_more(adapted: Callable[[str], Model]) -> None:
    decoder = adapted("vaultgemma").decoder
    cache = decoder.new_cache()
    request = cache.open(1500)
    tokens = torch.randint(0, 4096, (1200,))
    decoder.forward(tokens, Rows.chains([(request, 0, 1200)]), cache, torch.tensor([1199]))
    with pytest.raises(UserError, match="by 600 tokens: its window has let go"):
        cache.truncate(request, 600)
    cache.truncate(request, 1000)
    one = decoder.forward(tokens[1000:1040], Rows.chains([(request, 1000, 40)]), cache).logits
    other = cache.open(1500)
    all_of_it = decoder.forward(tokens[:1040], Rows.chains([(other, 0, 1040)]), cache).logits[1000:]
    assert (one - all_of_it).norm() < 1e-4 * all_of_it.norm()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mamba", "a state of the whole text"),
        ("xlnet", "what follows it"),
        ("deepseek_v4", "its DeepseekV4HCACache does not say how"),
    ],
)
def test_where_drafts_cannot_be_verified_it_decodes_plainly_and_says_so(
    kind: str, why: str, adapted: Callable[[str], Model]
) -> None:
    model = adapted(kind)
    chosen = drafter_by_name(model, "lookup")
    assert chosen.drafter is None and why in chosen.note
    drafted = texts(model, LookupDrafter(), 12)
    assert drafted.metrics.drafted == 0 and drafted.tokens == texts(model, None, 12).tokens


def test_a_model_that_takes_single_tokens_is_given_single_tokens(adapted: Callable[[str], Model]) -> None:
    """recurrent_gemma begins anew where several tokens come on top of a state; its logits stay those of the text."""
    decoder: Any = adapted("recurrent_gemma").decoder
    assert decoder.capability.steps == "single"
    cache, tokens = decoder.new_cache(), torch.tensor(PROMPT)
    whole = decoder.forward(tokens, Rows.chains([(cache.open(12), 0, 12)]), cache).logits
    request = cache.open(12)
    decoder.forward(tokens[:5], Rows.chains([(request, 0, 5)]), cache)
    rest = decoder.forward(tokens[5:], Rows.chains([(request, 5, 7)]), cache).logits
    assert (rest - whole[5:]).norm() < 1e-4 * whole[5:].norm()


def test_a_draft_that_cannot_be_rolled_back_is_refused(adapted: Callable[[str], Model]) -> None:
    target, draft = adapted("bloom"), adapted("mamba")
    with pytest.raises(UserError, match="mamba cannot draft: the cache of MambaForCausalLM cannot be rolled back"):
        drafter_by_name(target, "model", draft.path)
