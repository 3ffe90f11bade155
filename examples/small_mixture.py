"""A small mixture of 64 experts, trained on text for some minutes, and which experts held-out text goes to in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from calib.training_text import Stream

EXPERTS, CHOSEN, LAYERS = 64, 8, 4
LENGTH, BATCH = 256, 8
WIDTHS = (1, 2, 3, 4, 8, 16)
# Tokens of the vocabulary, besides those of a batch, that the loss tells from the right ones: all would take most of
# the time, and routers learn nothing more by them.
OTHERS = 2048
# What a step adds to or takes from an expert's correction.
CORRECTION = 0.003


@dataclass(frozen=True)
class Form:
    """A form of mixture: what the small one is, and the sizes that its routes are timed at.

    small     arguments of transformers' configuration of `kind`, besides those that all have.
    changes   to the published configuration.
    layers    the published model's first layers alone; None: all.
    balanced  whether corrections keep experts even; else a loss does.
    """

    kind: str
    small: dict[str, Any]
    shape: str
    changes: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    balanced: bool = False


_LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_WIDE = {"intermediate_size": 384, "moe_intermediate_size": 96, "num_hidden_layers": LAYERS + 1}
_MIX = {"n_routed_experts": EXPERTS, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_OLMOE = {"intermediate_size": 96, "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
_QWEN2 = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 768, "num_hidden_layers": LAYERS}
# Layers and vocabulary are a seventh, so that parts are to each other as they are in the whole.
_SEVENTH = {"vocab_size": 21_760, "bos_token_id": 0, "eos_token_id": 0}
FORMS = {
    "olmoe": Form("olmoe", _OLMOE | {"output_router_logits": True, "router_aux_loss_coef": 0.01}, "olmoe-1b-7b"),
    "deepseek": Form(
        "deepseek_v3", _LATENT | _WIDE | _MIX, "deepseek-v2-lite", {"num_experts_per_tok": CHOSEN}, balanced=True
    ),
    "qwen2": Form(
        "qwen2_moe",
        _QWEN2 | {"num_experts": EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.001},
        "qwen2-57b-a14b",
        _SEVENTH,
        layers=4,
    ),
}


def small_mixture(form: Form, vocabulary: int) -> nn.Module:
    """The form at a size that CPUs train."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    common = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6, "num_experts_per_tok": CHOSEN}
    common |= {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(form.kind, **common, **form.small))
    return model


def routers(model: nn.Module) -> list[nn.Module]:
    """Of each mixture, in order."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]


def watched(model: nn.Module) -> list[Tensor]:
    """A list that gets the experts (tokens, CHOSEN) of each mixture in each forward."""
    found: list[Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda _module, _inputs, made: found.append(made[2].detach()))
    return found


def sampled_loss(model: Any, ids: Tensor, draws: np.random.Generator) -> Tensor:
    """The loss of next tokens ids (B, T) among the batch's own tokens and OTHERS random ones, and what the form adds.

    A sampled softmax (Jean et al., 1412.2007) without its correction: what is learnt by is the order, not the odds.
    """
    out = model(input_ids=ids, logits_to_keep=1, output_hidden_states=True)
    others = torch.from_numpy(draws.integers(0, model.config.vocab_size, OTHERS))
    among, right = torch.cat((ids.flatten(), others)).unique(return_inverse=True)
    hidden = out.hidden_states[-1][:, :-1].flatten(0, 1)
    logits = hidden @ model.get_output_embeddings().weight[among].T
    right = right[: ids.numel()].view_as(ids)[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, right)
    extra = getattr(out, "aux_loss", None)
    return loss if extra is None else loss + model.config.router_aux_loss_coef * extra


def train(
    model: nn.Module, seen: list[Tensor], stream: "Stream", minutes: float, form: Form, say: Callable[[], str]
) -> None:
    """AdamW on random windows, its rate falling to nothing over the minutes; says four times how it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    draws, since, step, done, told = np.random.default_rng(0), time.monotonic(), 0, 0.0, 0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - done)
        starts = draws.integers(0, len(stream) - LENGTH, BATCH)
        ids = torch.from_numpy(np.stack([stream[at : at + LENGTH] for at in starts]).astype(np.int64))
        seen.clear()
        loss = sampled_loss(model, ids, draws)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for router, chosen in zip(routers(model), seen, strict=True) if form.balanced else ():
            bias = router.e_score_correction_bias
            assert isinstance(bias, Tensor)
            loads = chosen.flatten().bincount(minlength=EXPERTS).float()
            bias += CORRECTION * torch.sign(loads.mean() - loads)
        step, done = step + 1, (time.monotonic() - since) / (60 * minutes)
        if 4 * done >= told + 1:
            told = int(4 * done)
            print(f"step {step}, loss {loss.item():.2f}, {done:.0%} of {minutes:g} minutes; {say()}", flush=True)


@torch.no_grad()
def routes(model: nn.Module, seen: list[Tensor], windows: Tensor) -> Tensor:
    """(layers, tokens, CHOSEN) experts of held-out windows (count, length)."""
    found = []
    for window in windows:
        seen.clear()
        model(input_ids=window[None])
        found.append(torch.stack(seen))
    return torch.cat(found, dim=1)


def distinct(chosen: Tensor, width: int) -> float:
    """How many experts a layer reads for `width` neighbouring tokens, on average."""
    layers, tokens, _ = chosen.shape
    runs = chosen[:, : tokens // width * width].reshape(layers, -1, width * CHOSEN)
    marked = torch.zeros(*runs.shape[:2], EXPERTS).scatter_(2, runs, 1.0)
    return float(marked.sum(-1).mean())


def described(chosen: Tensor) -> str:
    """How many experts runs of tokens read, and how even the experts are."""
    loads = torch.stack([layer.flatten().bincount(minlength=EXPERTS) for layer in chosen]).float()
    runs = ", ".join(f"{distinct(chosen, width):.1f} of {width}" for width in WIDTHS)
    most = float((loads.amax(1) / loads.mean(1)).mean())
    return f"experts that a layer reads for neighbouring tokens: {runs}; the busiest has {most:.1f} times its share"


def trained_routes(form: Form, out: Path, minutes: float) -> Tensor:
    """The routes of held-out text of a mixture that was trained for so long; kept in `out`."""
    from transformers import AutoTokenizer

    from calib import corpora
    from calib.training_text import Measured, gather, tokenize
    from calib.windows import make_windows
    from compress.model.source import default_pair

    kept = out / "routes.pt"
    if kept.is_file():
        found: Tensor = torch.load(kept)
        print(described(found))
        return found
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(default_pair()[0])
    corpus, end = corpora.load(), tokenizer.eos_token_id
    cut = {"length": LENGTH, "calibration": 0, "evaluation_tokens": 32 * LENGTH, "seed": 0, "separator": end}
    windows = make_windows(corpus, tokenizer, **cut).evaluation
    text = gather("stdlib", Measured(None, corpus, tokenizer, **cut))
    stream = tokenize(text, tokenizer, out, length=LENGTH, separator=end, progress=lambda *_: None)
    model = small_mixture(form, len(tokenizer))
    seen = watched(model)
    train(model, seen, stream, minutes, form, lambda: described(routes(model, seen, windows)))
    found = routes(model.eval(), seen, windows)
    print(described(found))
    torch.save(found, kept)
    return found
