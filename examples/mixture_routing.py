"""What verifying drafts costs a mixture of 64 experts whose tokens are routed as a trained mixture routes text.

    python examples/mixture_routing.py --minutes 10 --out runs/mixture
    python -m runtime.bench speculate --target runs/mixture/model --drafter oracle --alpha 0.7 --draft tinyllama-tenth

A random router sends neighbouring tokens to experts that have nothing in common; a trained one does not. So a small
mixture of OLMoE's form (64 experts, 8 a token, four layers) is trained on text, and what it does with held-out text is
written into a model of OLMoE-1B-7B's sizes with random int4 weights: its token t goes to the experts that the trained
one chose for the t-th token of that text (layer l as layer l modulo 4 there), and the token after t is t + 1. The first
dimensions of its hidden state carry that: no layer writes to them. Prints how many experts runs of tokens read, and
times forwards of such runs. All else of the model is as any other: the same files, loader and kernels.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn

from runtime.bench.random_models import NO_SHARDS, RandomCheckpoint, Weight, model_config, write_weights
from runtime.bench.shapes import SHAPES
from runtime.cli import without_traceback
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

if TYPE_CHECKING:
    from calib.training_text import Stream

EXPERTS, CHOSEN, LAYERS = 64, 8, 4
LENGTH, BATCH = 256, 8
# Dimensions that say which token comes next: a random sign each.
CODE = 256
VOCABULARY = 32_000  # the drafts'
SHAPE = "olmoe-1b-7b"
WIDTHS = (1, 2, 4, 8, 16)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def small_mixture(vocabulary: int) -> nn.Module:
    """OLMoE's form at a size that CPUs train."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=6,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        pad_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = OlmoeForCausalLM(config)
    return model


def train(model: nn.Module, stream: "Stream", minutes: float) -> None:
    """AdamW on random windows, its rate falling to nothing over the minutes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    draws, since, step, done = np.random.default_rng(0), time.monotonic(), 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - done)
        starts = draws.integers(0, len(stream) - LENGTH, BATCH)
        ids = torch.from_numpy(np.stack([stream[at : at + LENGTH] for at in starts]).astype(np.int64))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, done = step + 1, (time.monotonic() - since) / (60 * minutes)
        if step % 50 == 1:
            print(f"step {step}, loss {loss.item():.2f}, {done:.0%} of {minutes:g} minutes", flush=True)


@torch.no_grad()
def routes(model: nn.Module, windows: Tensor) -> Tensor:
    """(layers, tokens, CHOSEN) experts of held-out windows (count, length), the best first."""
    found = []
    for window in windows:
        scores = model(input_ids=window[None]).router_logits
        found.append(torch.stack([layer.topk(CHOSEN).indices for layer in scores]))
    return torch.cat(found, dim=1)


def distinct(chosen: Tensor, width: int) -> float:
    """How many experts a layer reads for `width` neighbouring tokens, on average."""
    layers, tokens, _ = chosen.shape
    runs = chosen[:, : tokens // width * width].reshape(layers, -1, width * CHOSEN)
    marked = torch.zeros(*runs.shape[:2], EXPERTS).scatter_(2, runs, 1.0)
    return float(marked.sum(-1).mean())


@dataclass(frozen=True)
class RoutedCheckpoint(RandomCheckpoint):
    """A random model whose tokens carry the experts that they go to, and which token follows."""

    chosen: Tensor | None = None

    @property
    def _kept(self) -> int:
        """Dimensions of the hidden state that no layer writes to."""
        return self.shape_of.architecture.layers * EXPERTS + CODE

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
            first = int(name.split(".")[2]) * EXPERTS
            found = torch.zeros_like(found)
            found[:, first : first + EXPERTS] = 10 * torch.eye(EXPERTS, dtype=found.dtype)
        return found

    def _signs(self) -> Tensor:
        """(vocabulary, CODE) of 1 and −1."""
        return 2 * torch.randint(0, 2, (VOCABULARY, CODE), generator=torch.Generator().manual_seed(0)) - 1

    def _wanted(self) -> Tensor:
        """(vocabulary, layers · EXPERTS): what each token's experts are chosen by."""
        assert self.chosen is not None
        found = torch.zeros(VOCABULARY, self.shape_of.architecture.layers, EXPERTS)
        at = torch.arange(VOCABULARY) % self.chosen.shape[1]
        scores = (1 - torch.arange(CHOSEN) / 16).expand(VOCABULARY, CHOSEN)
        for layer in range(found.shape[1]):
            found[:, layer].scatter_(1, self.chosen[layer % len(self.chosen), at], scores)
        return found.flatten(1)


def write(chosen: Tensor, out: Path) -> None:
    """The model of OLMoE-1B-7B's sizes."""
    ends = {"vocab_size": VOCABULARY, "bos_token_id": VOCABULARY - 1, "eos_token_id": VOCABULARY - 1}
    config = model_config(SHAPE, "int4") | ends
    about = replace(SHAPES[SHAPE], config={**SHAPES[SHAPE].config, **ends})
    out.mkdir(parents=True)
    write_weights(out, RoutedCheckpoint(out, config, NO_SHARDS, about, "int4", "int8", chosen=chosen))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def time_model(folder: Path, rounds: int) -> None:
    """A table of forwards of runs of tokens."""
    from runtime.bench.forwards import time_forwards
    from runtime.bench.measure import machine, reading_speed
    from runtime.bench.output import console, show_scheme
    from runtime.model.load import load
    from runtime.model.native import NativeDecoder
    from runtime.native import default_threads

    threads = default_threads()
    decoder = load(folder, threads=threads).decoder
    if not isinstance(decoder, NativeDecoder):
        raise UserError("experts are counted by the native kernels, which were not built; see README")
    memory, out = reading_speed(threads), console(112)
    ids = torch.arange(1000, 2000)
    found = time_forwards(decoder, "int4", [("decode", width) for width in WIDTHS], rounds, memory, ids=ids)
    out.print(f"{SHAPE}, int4, routed as trained; {machine()['cpu']}, {threads} threads; {rounds} interleaved rounds.")
    show_scheme(out, "decode", "int4", found, memory.readings)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="A directory for the model; one that exists is timed again.")],
    minutes: Annotated[float, typer.Option(help="How long the small mixture is trained.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds that count.")] = 15,
) -> None:
    """Trains, writes and times."""
    from transformers import AutoTokenizer

    from calib import corpora
    from calib.training_text import Measured, gather, tokenize
    from calib.windows import make_windows
    from compress.model.source import default_pair

    with without_traceback():
        if not (out / "model" / "config.json").is_file():
            out.mkdir(parents=True, exist_ok=True)
            tokenizer = AutoTokenizer.from_pretrained(default_pair()[0])
            corpus, end = corpora.load(), tokenizer.eos_token_id
            cut = {"length": LENGTH, "calibration": 0, "evaluation_tokens": 32 * LENGTH, "seed": 0, "separator": end}
            windows = make_windows(corpus, tokenizer, **cut).evaluation
            text = gather("python", Measured(None, corpus, tokenizer, **cut))
            stream = tokenize(text, tokenizer, out, length=LENGTH, separator=end, progress=lambda *_: None)
            model = small_mixture(len(tokenizer))
            train(model, stream, minutes)
            chosen = routes(model.eval(), windows)
            found = ", ".join(f"{distinct(chosen, width):.1f} of {width}" for width in WIDTHS)
            print(f"experts that a layer reads for neighbouring tokens, of {EXPERTS}: {found}")
            write(chosen, out / "model")
        time_model(out / "model", rounds)


if __name__ == "__main__":
    app()
