"""What verifying drafts costs a mixture of 64 experts whose tokens are routed as a trained mixture routes text.

    python examples/mixture_routing.py --minutes 10 --out runs/mixture
    python examples/mixture_routing.py --form deepseek --minutes 10 --out runs/deepseek --rounds 9

A random router sends neighbouring tokens to experts that have nothing in common; a trained one does not. So a small
mixture (64 experts, 8 a token, four layers of them) is trained on text, and what it does with held-out text is written
into a model of published sizes with random int4 weights: its token t goes to the experts that the trained one chose for
the t-th token of that text (the l-th of its mixtures as the l modulo 4-th there), and the token after t is t + 1. The
first dimensions of its hidden state carry that: no layer writes to them. All else is as in any model: the same files,
loader and kernels.

    olmoe     OLMoE's form at OLMoE-1B-7B's sizes: experts alone, kept even by a loss
    deepseek  DeepSeek-V3's form (a first layer without experts, one expert for all rows, 4 of 8 groups a row, kept even
              by corrections) at DeepSeek-V2-Lite's sizes, which have two experts for all rows and here, too, 8 a token

Prints how many experts runs of tokens read, times forwards of such runs, and decodes speculatively at several
acceptances: an oracle's tokens, at the cost of a draft of `tinyllama-tenth`'s sizes, γ chosen.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from runtime.bench.random_models import NO_SHARDS, RandomCheckpoint, Weight, model_config, write_weights
from runtime.bench.shapes import SHAPES, Shape
from runtime.cli import without_traceback
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

if TYPE_CHECKING:
    from calib.training_text import Stream
    from runtime.model.load import Model

EXPERTS, CHOSEN, LAYERS = 64, 8, 4
LENGTH, BATCH = 256, 8
# Dimensions that say which token comes next: a random sign each.
CODE = 256
WIDTHS = (1, 2, 3, 4, 8, 16)
DRAFT = "tinyllama-tenth"
# What a step adds to or takes from an expert's correction.
CORRECTION = 0.003
PROMPTS, PROMPT, NEW_TOKENS = 6, 32, 128
ACCEPTANCES = [0.0, 0.2, 0.4, 0.7]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Form:
    """A form of mixture: what the small one is, and the sizes that its routes are timed at.

    small     arguments of transformers' configuration of `kind`, besides those that all have.
    changes   to the published configuration.
    balanced  whether corrections keep experts even; else a loss does.
    """

    kind: str
    small: dict[str, Any]
    shape: str
    changes: dict[str, Any] = field(default_factory=dict)
    balanced: bool = False


_LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_WIDE = {"intermediate_size": 384, "moe_intermediate_size": 96, "num_hidden_layers": LAYERS + 1}
_MIX = {"n_routed_experts": EXPERTS, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_EVEN = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
_OLMOE = {"intermediate_size": 96, "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
FORMS = {
    "olmoe": Form("olmoe", _OLMOE | _EVEN, "olmoe-1b-7b"),
    "deepseek": Form(
        "deepseek_v3", _LATENT | _WIDE | _MIX, "deepseek-v2-lite", {"num_experts_per_tok": CHOSEN}, balanced=True
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
        loss = model(input_ids=ids, labels=ids).loss
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


def typical(chosen: Tensor) -> int:
    """Where runs of all widths read as many experts as such runs do on average, or nearly."""
    marked = torch.zeros(*chosen.shape[:2], EXPERTS).scatter_(2, chosen, 1.0)
    starts = chosen.shape[1] - WIDTHS[-1]
    each = [marked.unfold(1, width, 1).amax(-1).sum(-1).mean(0)[:starts] for width in WIDTHS]
    return int(torch.stack([counts / counts.mean() - 1 for counts in each]).abs().amax(0).argmin())


@dataclass(frozen=True)
class RoutedCheckpoint(RandomCheckpoint):
    """A random model whose tokens carry the experts that they go to, and which token follows."""

    chosen: Tensor | None = None
    _kept = LAYERS * EXPERTS + CODE
    """Dimensions of the hidden state that no layer writes to."""

    def weight(self, prefix: str, unpack: bool = True) -> Weight:
        """See RandomCheckpoint. Layers leave the first dimensions of hidden states alone; the head reads the code."""
        found = super().weight(prefix, unpack)
        if prefix.endswith(("o_proj", "down_proj")):
            assert isinstance(found, PackedWeight)
            codes = found.codes.clone()
            codes[: self._kept] = 0
            return replace(found, codes=codes)
        if prefix == "lm_head":
            assert isinstance(found, PackedWeight)
            codes = torch.zeros_like(found.codes)
            codes[:, self._kept - CODE : self._kept] = 100 * self._signs().roll(1, 0).to(torch.int8)
            return replace(found, codes=codes)
        return found

    def tensor(self, name: str) -> Tensor:
        """See RandomCheckpoint."""
        found = super().tensor(name)
        if name == "model.embed_tokens.weight":
            found[:, : self._kept - CODE] = self._wanted().to(found.dtype)
            found[:, self._kept - CODE : self._kept] = self._signs().to(found.dtype)
        elif name.endswith("mlp.gate.weight"):
            mixture = int(name.split(".")[2]) - len(self.shape_of.architecture.dense_layers)
            first = mixture % LAYERS * EXPERTS
            found = torch.zeros_like(found)
            found[:, first : first + EXPERTS] = 10 * torch.eye(EXPERTS, dtype=found.dtype)
        return found

    def _signs(self) -> Tensor:
        """(vocabulary, CODE) of 1 and −1."""
        size = (self.shape_of.architecture.vocab, CODE)
        return 2 * torch.randint(0, 2, size, generator=torch.Generator().manual_seed(0)) - 1

    def _wanted(self) -> Tensor:
        """(vocabulary, LAYERS · EXPERTS): what each token's experts are chosen by."""
        assert self.chosen is not None
        count = self.shape_of.architecture.vocab
        found = torch.zeros(count, LAYERS, EXPERTS)
        at = torch.arange(count) % self.chosen.shape[1]
        scores = (1 - torch.arange(CHOSEN) / 16).expand(count, CHOSEN)
        for layer in range(LAYERS):
            found[:, layer].scatter_(1, self.chosen[layer, at], scores)
        return found.flatten(1)


def write(form: Form, chosen: Tensor, out: Path, layers: int | None) -> None:
    """The model of published sizes in `out`/model, and a draft of its vocabulary in `out`/draft."""
    published = SHAPES[form.shape].first(layers)
    ends = {name: published.config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    for name, shape, changes in (("model", published, form.changes), ("draft", SHAPES[DRAFT], ends)):
        config = model_config(shape.name, "int4", layers=shape.config["num_hidden_layers"]) | changes
        (folder := out / name).mkdir(parents=True)
        about = (folder, config, NO_SHARDS, Shape(shape.name, {**shape.config, **changes}), "int4", "int8")
        write_weights(folder, RoutedCheckpoint(*about, chosen=chosen) if name == "model" else RandomCheckpoint(*about))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def time_forwards(model: "Model", start: int, rounds: int) -> None:
    """A table of forwards of runs of tokens from `start` on."""
    from runtime.bench import forwards
    from runtime.bench.measure import reading_speed
    from runtime.bench.output import console, show_scheme
    from runtime.model.native import NativeDecoder

    decoder = model.decoder
    if not isinstance(decoder, NativeDecoder):
        raise UserError("experts are counted by the native kernels, which were not built; see README")
    memory = reading_speed(decoder.threads)
    tasks = [("decode", width) for width in WIDTHS]
    found = forwards.time_forwards(decoder, "int4", tasks, rounds, memory, ids=torch.arange(start, start + 1000))
    show_scheme(console(112), "decode", "int4", found, memory.readings)
    told = ", ".join(f"{row['bytes_read'] / found[0]['bytes_read']:.2f} at {row['width']}" for row in found)
    print(f"bytes over those of width 1: {told}")


def speculate(model: "Model", draft: "Model", acceptances: Sequence[float], rounds: int) -> None:
    """A table of plain and speculative decoding in turns, for each acceptance."""
    from runtime.bench.jobs import plain_texts
    from runtime.bench.oracle import OracleDrafter
    from runtime.bench.output import console, table
    from runtime.bench.speculate import Item, Job, measure, row
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import NoDrafter

    items = tuple(Item([*range(at, at + PROMPT)], "runs") for at in range(1000, 1000 + 500 * PROMPTS, 500))
    plain = Job(model.decoder, NoDrafter(), items, NEW_TOKENS, 1, Sampling(), "coupled", None)
    known, found = plain_texts(plain), []
    for alpha in acceptances:
        job = replace(plain, drafter=OracleDrafter(draft, known, alpha, 0, model.decoder.vocab_size))
        ways = measure(job, rounds, lambda _: None)
        each = [a / b for a, b in zip(ways[1].tokens_per_second, ways[0].tokens_per_second, strict=True)]
        found.append(row(job, *ways, None) | {"acceptance": alpha, "least": min(each)})
    columns = (
        ("acceptance", "acceptance a token", ".1f"), ("drafted_per_round", "γ", ".2f"),
        ("tokens_per_round", "tokens a round", ".2f"), ("draft_step_ratio", "draft step", ".3f"),
        ("decode_speedup", "speedup", ".2f"), ("speedup", "with prompts", ".2f"),
        ("least", "least of a round", ".2f"), ("mismatches", "texts that differ", "d"),
    )  # fmt: skip
    console(112).print(table(columns, found, f"γ chosen; medians of {rounds} rounds in turns"))


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="A directory for the models; one that has them is timed again.")],
    form: Annotated[str, typer.Option(help=f"{' or '.join(FORMS)}.")] = "olmoe",
    minutes: Annotated[float, typer.Option(help="How long the small mixture is trained.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds that count.")] = 9,
    acceptance: Annotated[list[float], typer.Option(help="The oracle's, per token; may be repeated.")] = ACCEPTANCES,
    layers: Annotated[int | None, typer.Option(help="The model of its first layers alone.", show_default="all")] = None,
) -> None:
    """Trains, writes, times and speculates."""
    from runtime.bench.measure import machine
    from runtime.model.load import load

    with without_traceback():
        if form not in FORMS:
            raise UserError(f"--form: {form!r} is unknown; use one of {', '.join(FORMS)}")
        chosen = trained_routes(FORMS[form], out, minutes)
        if not (out / "draft" / "config.json").is_file():
            write(FORMS[form], chosen, out, layers)
        model, draft = load(out / "model"), load(out / "draft")
        print(f"{FORMS[form].shape}, int4, routed as trained; {machine()['cpu']}, {model.decoder.threads} threads")
        time_forwards(model, typical(chosen), rounds)
        speculate(model, draft, acceptance, rounds)


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


if __name__ == "__main__":
    app()
