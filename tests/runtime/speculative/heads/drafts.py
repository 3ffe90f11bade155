"""Random heads of others' classes, and what is drafted with them here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import Model
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Request, TakenStates
from runtime.speculative.drafters.published import PublishedDrafter
from runtime.speculative.heads.load import load_head

LENGTH, VOCAB, HIDDEN = 23, 320, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def block(kind: str, layers: int, **changes: Any) -> Any:
    from transformers import AutoConfig

    made = AutoConfig.for_model(kind, **SIZES, num_hidden_layers=layers, **changes)
    made._attn_implementation = "eager"
    return made


def filled(model: Any, seed: int) -> Any:
    """The model with random weights, and every fifth token in its draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.2 if "norm" in name else 1.0 if name == "mask_hidden" else tensor.shape[-1] ** -0.5
            tensor.copy_(spread * torch.randn(tensor.shape, generator=generator) + (1.0 if "norm" in name else 0.0))
        if getattr(model, "d2t", None) is not None:
            kept = torch.arange(model.draft_vocab_size) * 5
            model.d2t.copy_(kept - torch.arange(len(kept)))
            model.t2d.zero_()
            model.t2d[kept] = True
    return model.eval()


def drafted(
    target: Model, folder: Path, kind: str, tokens: list[int], taken: Tensor, budget: int
) -> tuple[list[int], list[Tensor], Tensor]:
    """A draft, the logits that it came from, and the hidden states (n, hidden) before the output layer."""
    own, seen, hidden = load_head(folder, kind, target), [], []  # type: ignore[arg-type,var-annotated]
    head = replace(own, lm_head=lambda x: (hidden.append(x), own.lm_head(x))[1])  # type: ignore[arg-type]
    drafter = PublishedDrafter(head, head.about.at(target.decoder.layers))
    choose = drafter._choose
    drafter._choose = lambda logits, drafting: (seen.append(logits.clone()), choose(logits, drafting))[1]  # type: ignore[assignment,func-returns-value]
    request = Request(0, tokens, len(tokens), Sampling(), 100)
    # The text comes in pieces.
    for start, end in ((0, 9), (9, 10), (10, len(tokens) - 1)):
        drafter.read([TakenStates(request, start, taken[start:end])])
        if end == 9:
            early = Request(0, tokens[:10], 10, Sampling(), 100)
            drafter.propose([early], [2])
    seen.clear()
    hidden.clear()
    return drafter.propose([request], [budget])[0].tokens, seen, torch.cat(hidden)


def text_and_states(depths: int, seed: int = 2) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist()
    return tokens, torch.randn((LENGTH - 1, depths * HIDDEN), generator=generator)
