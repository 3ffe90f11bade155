"""What verifying drafts costs a mixture of 64 experts whose tokens are routed as a trained mixture routes text.

    python examples/mixture_routing.py --minutes 10 --out runs/mixture
    python examples/mixture_routing.py --form deepseek --minutes 10 --out runs/deepseek
    python examples/mixture_routing.py --form qwen2 --minutes 10 --out runs/qwen2 --rounds 3

A random router sends neighbouring tokens to experts that have nothing in common; a trained one does not. So a small
mixture (64 experts, 8 a token, four layers of them) is trained on text, and what it does with held-out text is written
into a model of published sizes with random int4 weights: its token t goes to the experts that the trained one chose for
the t-th token of that text (the l-th of its mixtures as the l modulo 4-th there), and the token after t is t + 1. The
first dimensions of its hidden state carry that: no layer writes to them. All else is as in any model: the same files,
loader and kernels.

    olmoe     OLMoE's form at OLMoE-1B-7B's sizes: experts alone, kept even by a loss
    deepseek  DeepSeek-V3's form (a first layer without experts, one expert for all rows, 4 of 8 groups a row, kept even
              by corrections) at DeepSeek-V2-Lite's sizes, which have two experts for all rows and here, too, 8 a token
    qwen2     Qwen2-MoE's form (an expert of eight times the width for all rows, its loss for even experts a tenth of
              OLMoE's) at Qwen2-57B-A14B's sizes: a seventh of its layers and of its vocabulary

Prints how many experts runs of tokens read, times forwards of such runs, and decodes speculatively at several
acceptances: an oracle's tokens, at the cost of a draft of `tinyllama-tenth`'s sizes, γ chosen. small_mixture.py trains.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from small_mixture import CHOSEN, EXPERTS, FORMS, LAYERS, WIDTHS, Form, trained_routes
from torch import Tensor

from runtime.bench.random_models import NO_SHARDS, RandomCheckpoint, Weight, model_config, write_weights
from runtime.bench.shapes import SHAPES, Shape
from runtime.cli import without_traceback
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

if TYPE_CHECKING:
    from runtime.bench.speculate import Item, Job, Way
    from runtime.model.load import Model

# Dimensions that say which token comes next: a random sign each.
CODE = 256
DRAFT = "tinyllama-tenth"
# Texts; those that a new engine begins with are timed apart: it does not know yet what drafts cost and bring.
PROMPTS, FIRST, PROMPT, NEW_TOKENS = 6, 2, 32, 128
ACCEPTANCES = [0.0, 0.2, 0.4, 0.7]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


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
    published = SHAPES[form.shape].first(form.layers if layers is None else layers)
    whole = {**published.config, **form.changes}
    ends = {name: whole[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
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


def in_turns(job: "Job", both: "Sequence[Way]", items: "Sequence[Item]") -> list[float]:
    """Each text by both ways, one right after the other, for a machine changes its speed: a pass each.

    How many times the first way's tokens per second the second one makes of each text.
    """
    from runtime.bench.speculate import run_once

    found = []
    for place, item in enumerate(items):
        for way in both if place % 2 == 0 else reversed(both):
            way.passes.append(run_once(job, way, [item]))
        first, second = (way.passes[-1].seconds for way in both)
        found.append(first / second)
    return found


def compared(job: "Job", rounds: int) -> dict[str, Any]:
    """A row of the table: the job's drafts beside plain decoding; of a job without drafts plain decoding beside itself.

    Ratios of texts in turns: their median, and that of the worst round.
    """
    from runtime.bench.speculate import row, ways

    both = ways(job)
    in_turns(job, both, job.items[:FIRST])
    for way in both:
        way.passes.clear()
    each = [in_turns(job, both, job.items) for _ in range(rounds)]
    plain, spoken = ([one.tokens for one in way.passes] for way in both)
    # Each pass is one text.
    return row(replace(job, items=job.items[:1]), *both, None) | {
        "least": min(map(median, each)),
        "mismatches": sum(a != b for a, b in zip(plain, spoken, strict=True)),
    }


def speculate(model: "Model", draft: "Model", acceptances: Sequence[float], rounds: int) -> None:
    """A table of plain and speculative decoding, each text in turns, for each acceptance."""
    from runtime.bench.jobs import plain_texts
    from runtime.bench.oracle import OracleDrafter
    from runtime.bench.output import console, table
    from runtime.bench.speculate import Item, Job, ways
    from runtime.sampling.params import Sampling
    from runtime.speculative.costs import first_costs
    from runtime.speculative.draft import NoDrafter

    items = tuple(Item([*range(at, at + PROMPT)], "runs") for at in range(1000, 1000 + 500 * PROMPTS, 500))
    plain = Job(model.decoder, NoDrafter(), items, NEW_TOKENS, 1, Sampling(), "coupled", None)
    widths = first_costs(model, items[0].tokens)
    print("costs that servers begin with: " + ", ".join(f"{cost:.2f} at {width}" for width, cost in widths.items()))
    known = plain_texts(plain)
    # What the machine alone makes of equal work.
    found = [compared(replace(plain, draft_length=0), rounds) | {"acceptance": None}]
    for alpha in acceptances:
        # Of another seed for each round, and so of other tokens accepted: the first few decide how a new engine begins.
        oracles = [OracleDrafter(draft, known, alpha, seed, model.decoder.vocab_size) for seed in range(rounds)]
        jobs = [replace(plain, drafter=oracle, widths=widths) for oracle in oracles]
        first = [median(in_turns(job, ways(job), job.items[:FIRST])) for job in jobs]
        told = {"acceptance": alpha, "first": median(first), "least_first": min(first)}
        found.append(compared(jobs[0], rounds) | told)
    columns = (
        ("acceptance", "acceptance a token", ".1f"), ("drafted_per_round", "γ", ".2f"),
        ("tokens_per_round", "tokens a round", ".2f"), ("draft_step_ratio", "draft step", ".3f"),
        ("decode_speedup", "speedup", ".2f"), ("speedup", "with prompts", ".2f"),
        ("least", "worst round", ".2f"), ("first", f"first {FIRST} texts", ".2f"),
        ("least_first", "least of them", ".2f"), ("mismatches", "texts that differ", "d"),
    )  # fmt: skip
    title = f"γ chosen, over plain decoding; medians of {rounds * PROMPTS} texts in turns; first row: plain over plain"
    console(112).print(table(columns, found, title))


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="A directory for the models; one that has them is timed again.")],
    form: Annotated[str, typer.Option(help=f"{' or '.join(FORMS)}.")] = "olmoe",
    minutes: Annotated[float, typer.Option(help="How long the small mixture is trained.")] = 10.0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds that count.")] = 9,
    acceptance: Annotated[list[float], typer.Option(help="The oracle's, per token; may be repeated.")] = ACCEPTANCES,
    layers: Annotated[
        int | None, typer.Option(help="The model of its first layers alone.", show_default="the form's")
    ] = None,
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


if __name__ == "__main__":
    app()
