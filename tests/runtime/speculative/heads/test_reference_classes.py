"""Hidden states, logits and drafts are those of the classes that write these files: `speculators` (where installed).

Random heads of every layout, saved by the reference class and read here; so are drafts of several tokens, whose later
rows follow tokens and states of the head's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Model, load
from runtime.speculative.drafters import published
from tests.runtime.speculative.heads.drafts import HIDDEN, LENGTH, VOCAB, block, drafted, filled, text_and_states

pytest.importorskip("speculators")

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Model:
    return load(tiny("llama", num_hidden_layers=6), kernels="reference")


def config(algorithm: str, tokens: int) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
    )


def with_tables(model: Any, target: Model) -> Any:
    """The model with the target's own embeddings, and its output layer where the vocabulary is whole."""
    table = target.decoder.parts.embedding  # type: ignore[attr-defined]
    model.embed_tokens.weight.data = table.clone()
    if model.draft_vocab_size == VOCAB:
        model.lm_head.weight.data = table.clone()
    return model


def captured(model: Any, run: Callable[[], Any]) -> list[Tensor]:
    """What goes into and comes out of the output layer each time: [(hidden, logits), …] one after the other."""
    found: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, given, out: found.extend((given[0][0], out[0])))
    with torch.no_grad():
        run()
    handle.remove()
    return found


@pytest.mark.parametrize(
    ("kind", "layers", "flags"),
    [
        ("llama", 1, {}),
        ("qwen3", 1, {"norm_before_residual": True, "norm_before_fc": True}),
        ("llama", 2, {"fc_norm": True, "norm_output": True}),
        ("qwen3", 1, {"draft_vocab_size": VOCAB}),
    ],
)
def test_eagle3(target: Model, tmp_path: Path, kind: str, layers: int, flags: dict[str, Any]) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    about = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 3, 6], **flags}
    model = filled(
        Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=block(kind, layers), speculators_config=config("eagle3", 3), **about
            )
        ),
        1,
    )
    model.save_pretrained(tmp_path / "head")
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    taken = torch.randn((LENGTH - 1, 3 * HIDDEN), generator=torch.Generator().manual_seed(3))
    draft, logits, states = drafted(target, tmp_path / "head", "eagle3", tokens, taken, 4)
    # The reference reads shifted texts, and steps of the last row follow the tokens that we drafted.
    text = torch.tensor([[*tokens[1:], *draft]])
    read = torch.cat((taken, torch.zeros(len(draft), 3 * HIDDEN)))[None]
    found = captured(model, lambda: model(read, text, torch.zeros_like(text), ttt_steps=4))
    for step in range(4):
        assert torch.allclose(found[2 * step][LENGTH - 2], states[step], atol=1e-4), step
        assert torch.allclose(found[2 * step + 1][LENGTH - 2], logits[step][0], atol=1e-4), step
    ids = model.d2t + torch.arange(len(model.d2t)) if model.d2t is not None else torch.arange(VOCAB)
    assert draft == [int(ids[row[0].argmax()]) for row in logits]


def padded(states: Tensor, length: int) -> Tensor:
    """(1, length, …): what the target read, and rows that nobody may see."""
    return torch.cat((states, torch.full((length - len(states), states.shape[1]), 3.0)))[None]


@pytest.mark.parametrize(
    ("kind", "layers", "flags"),
    [("llama", 3, {}), ("qwen3", 1, {"norm_before_residual": True, "norm_before_fc": True})],
)
def test_peagle(
    target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, flags: dict[str, Any]
) -> None:
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    about = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [2, 5], "mask_token_id": 7, **flags}
    parts = {"transformer_layer_config": block(kind, layers), "speculators_config": config("peagle", 5)}
    model = filled(PEagleDraftModel(PEagleSpeculatorConfig(**parts, **about)), 4)
    model.save_pretrained(tmp_path / "head")
    tokens, taken = text_and_states(2)
    draft, logits, states = drafted(target, tmp_path / "head", "peagle", tokens, taken, 9)
    assert len(draft) == 5
    length, last = LENGTH + 6, LENGTH - 2
    sampled = torch.tensor([*range(length), *[last] * 4]), torch.tensor([*[0] * length, 1, 2, 3, 4])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: sampled)
    monkeypatch.setattr(core, "compute_metrics", lambda **_: (0.0, {}))
    text = torch.tensor([[*tokens[1:], *[1] * (length - LENGTH + 1)]])
    last_states = torch.zeros((1, length, HIDDEN))
    found = captured(
        model,
        lambda: model(padded(taken, length), text, torch.zeros_like(text), verifier_last_hidden_states=last_states),
    )
    for step, row in enumerate([last, *range(length, length + 4)]):
        assert torch.allclose(found[0][row], states[step], atol=1e-4), step
        assert torch.allclose(found[1][row], logits[step][0], atol=1e-4), step
    assert draft == [5 * int(row[0].argmax()) for row in logits]


def windows(layers: int) -> dict[str, Any]:
    return {
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"draft_vocab_size": VOCAB},
        {"sample_from_anchor": True},
        {"sliding": True},
        {"sliding": True, "sliding_window_non_causal": True},
    ],
)
def test_dflash(target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> None:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core

    sliding = windows(2) if flags.pop("sliding", False) else {}
    about = {"draft_vocab_size": 64, "aux_hidden_state_layer_ids": [1, 6], "mask_token_id": 7, "block_size": 6, **flags}
    parts = {"transformer_layer_config": block("qwen3", 2, **sliding), "speculators_config": config("dflash", 5)}
    model = with_tables(filled(DFlashDraftModel(DFlashSpeculatorConfig(**parts, **about)), 5), target)
    model.save_pretrained(tmp_path / "head")
    tokens, taken = text_and_states(2)
    draft, logits, states = drafted(target, tmp_path / "head", "dflash", tokens, taken, 9)
    anchored = bool(flags.get("sample_from_anchor"))
    assert len(draft) == (6 if anchored else 5)
    length = LENGTH + 7
    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor([LENGTH - 1]), torch.tensor([True])))
    monkeypatch.setattr(core, "compute_metrics", lambda *_, **__: (0.0, {}))
    text = torch.tensor([[*tokens, *[1] * (length - LENGTH)]])
    rest = torch.ones_like(text), torch.zeros((1, length, HIDDEN)), torch.zeros_like(text)
    found = captured(model, lambda: model(padded(taken, length), text, *rest, max_anchors=1))
    for step in range(len(draft)):
        row = step + (0 if anchored else 1)
        assert torch.allclose(found[0][row], states[step], atol=1e-4), step
        assert torch.allclose(found[1][row], logits[step][0], atol=1e-4), step


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_dspark(target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core

    about = {"draft_vocab_size": 64, "aux_hidden_state_layer_ids": [1, 6], "mask_token_id": 7, "block_size": 5}
    about |= {"markov_rank": 12, "markov_head_type": head}
    parts = {"transformer_layer_config": block("qwen3", 2), "speculators_config": config("dspark", 5)}
    model = with_tables(filled(DSparkDraftModel(DSparkSpeculatorConfig(**parts, **about)), 6), target)
    model.save_pretrained(tmp_path / "head")
    tokens, taken = text_and_states(2)
    monkeypatch.setattr(published, "WORTH", 0.0)
    draft, logits, _ = drafted(target, tmp_path / "head", "dspark", tokens, taken, 9)
    length, found = LENGTH + 7, []
    from speculators.models.dflash import core as below

    monkeypatch.setattr(below, "select_anchors", lambda *_: (torch.tensor([LENGTH - 1]), torch.tensor([True])))
    monkeypatch.setattr(core, "compute_metrics", lambda *given, **_: (found.extend(given[:3:2]), (0.0, {}))[1])
    text = torch.tensor([[*tokens, *draft, *[1] * (length - LENGTH - len(draft))]])
    rest = torch.ones_like(text), torch.zeros((1, length, HIDDEN)), torch.zeros_like(text)
    with torch.no_grad():
        model(padded(taken, length), text, *rest, max_anchors=1)
    assert len(draft) == 5
    for step in range(5):
        assert torch.allclose(found[0][0, step], logits[step][0], atol=1e-4), step
    assert draft == [5 * int(row[0].argmax()) for row in logits]
    # The draft ends where the confidence head no longer expects its tokens to be accepted.
    reached = found[1][0].sigmoid().cumprod(0)
    for worth in (0.5, 0.2, 0.05):
        monkeypatch.setattr(published, "WORTH", worth)
        cut, *_ = drafted(target, tmp_path / "head", "dspark", tokens, taken, 9)
        assert cut == draft[: int((reached >= worth).sum())]


QWEN35 = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


@pytest.mark.parametrize(("kind", "changes"), [("qwen3", {}), ("qwen3_5_text", QWEN35)])
def test_mtp(target: Model, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    parts = {"transformer_layer_config": block(kind, 4, **changes), "speculators_config": config("mtp", 1)}
    model = with_tables(filled(MTPDraftModel(MTPSpeculatorConfig(**parts)), 7), target)
    model.save_pretrained(tmp_path / "head")
    tokens, taken = text_and_states(1)
    draft, logits, states = drafted(target, tmp_path / "head", "mtp", tokens, taken, 1)
    norm, eps = target.decoder.parts.norm.weight, target.decoder.architecture.norm_eps  # type: ignore[attr-defined]
    hidden = torch.nn.functional.rms_norm(taken, (HIDDEN,), norm, eps)
    text = torch.tensor([[*tokens, 1, 1]])
    found = captured(model, lambda: model(text, padded(hidden, LENGTH + 2)))
    assert torch.allclose(found[0][LENGTH - 2], states[0], atol=1e-4)
    assert torch.allclose(found[1][LENGTH - 2], logits[0][0], atol=1e-4)
    assert draft == [int(logits[0][0].argmax())]
