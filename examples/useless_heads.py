"""What a drafter that is never right costs where γ is chosen, beside plain decoding: it should be next to nothing.

    python examples/useless_heads.py
    python examples/useless_heads.py --shape tinyllama-tenth --kinds oracle,block,eagle3 --rounds 9

All drafters have random weights in the sizes that such drafters have; the oracle drafts with a model and is wrong each
time. Plain decoding and the drafters write the same text side by side, in turns of 32 tokens, and the mean over all
turns is printed of what a drafter's took over plain decoding's: a machine that is slow for a while is so for all of
them. Where it was elsewhere during a turn of one, that turn counts as 25 % longer or shorter: finding out costs less
than that in any turn. "First" is what a new controller's first texts cost, while it finds out; "after" are the same
texts again.
"""

import json
import time
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from runtime.bench.speculate import Job
    from runtime.engine.engine import Engine
    from runtime.model.load import Model
    from runtime.speculative.draft import Drafter, Request
    from runtime.speculative.drafters.medusa import Heads

PAIR = Path(__file__).parent / "pair"
# Tokens of a turn: more than the rounds behind a draft that find much less of the target in the caches; and what one
# turn over another counts for at most.
TURN, MOST = 32, 1.25
KINDS = ("oracle", "block", "medusa", "eagle3", "dflash", "dspark")
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Taken(NamedTuple):
    """What a turn took: seconds, and the processor's."""

    seconds: float
    processor: float


def published_head(folder: Path, kind: str, model: "Model") -> Path:
    """A head of random weights as speculators publishes it: one layer of the target's sizes."""
    from safetensors.torch import save_file

    from runtime.checkpoints.heads.layouts import layout_of
    from runtime.checkpoints.heads.open import stored
    from runtime.model.base import BaseDecoder

    assert isinstance(model.decoder, BaseDecoder)
    a, depth = model.decoder.architecture, model.decoder.layers
    depths = sorted({1, depth // 2, depth})
    values: dict[str, Any] = {
        "speculators_model_type": kind,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": a.vocab,
            "hidden_size": a.hidden,
            "intermediate_size": a.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "rms_norm_eps": a.norm_eps,
        },
        "draft_vocab_size": a.vocab,
        "mask_token_id": 0,
        "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids": depths,
    }
    layout = layout_of(values)
    assert layout is not None
    shapes = layout.describe(values, "config.json").shapes()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({stored(name, layout): _drawn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def medusa_heads(model: "Model", count: int = 3) -> "Heads":
    """Medusa's heads of random weights: one block each, and the target's own projection."""
    from runtime.checkpoints.medusa import Description
    from runtime.kernels.dispatch import linear
    from runtime.model.base import BaseDecoder
    from runtime.speculative.drafters.medusa import Head, Heads

    decoder = model.decoder
    assert isinstance(decoder, BaseDecoder)
    size, vocab = decoder.hidden_size, decoder.vocab_size
    choices = tuple(tuple([0] * depth) for depth in range(1, count + 1))
    about = Description(count, 1, size, vocab, True, choices, "")
    first = linear(_drawn((count * size, size)), None, decoder.kernel)
    heads = tuple(Head((), linear(_drawn((size, size)), None, decoder.kernel)) for _ in range(count))
    return Heads(about, first, heads, decoder.parts.head)


def _drawn(shape: tuple[int, ...]) -> "torch.Tensor":
    import torch

    return torch.ones(shape) if len(shape) < 2 else torch.randn(shape) * shape[-1] ** -0.5


def drafter_of(kind: str, model: "Model", job: "Job", folder: Path, draft: "Model | None") -> "Drafter":
    """A drafter of a kind. The oracle knows the text, and says something else; so does the block drafter."""
    from runtime.bench.jobs import oracle_for, plain_texts
    from runtime.bench.replay import ReplayedDrafter, random_network
    from runtime.speculative.drafters.block import BlockDrafter
    from runtime.speculative.drafters.by_name import make
    from runtime.speculative.drafters.medusa import MedusaDrafter

    if kind == "oracle":
        assert draft is not None
        return oracle_for(job, draft, 0.0)
    if kind == "block":
        # One of random weights now and then repeats a token that the target repeats, too.
        return ReplayedDrafter(BlockDrafter(random_network(model)), plain_texts(job), (0.0,), model.decoder.vocab_size)
    if kind == "medusa":
        return MedusaDrafter(medusa_heads(model))
    return make(model, kind, heads=published_head(folder / kind, kind, model))


def measured(
    target: Path, draft: Path, kinds: list[str], count: int, new_tokens: int, rounds: int, threads: int | None
) -> dict[str, tuple[float, float, float]]:
    """By drafter, over plain decoding's: the time of the first and of later texts, and the processor's time of both."""
    import torch

    from runtime.bench.jobs import random_items
    from runtime.bench.speculate import Job
    from runtime.engine.engine import Engine
    from runtime.engine.metrics import Metrics
    from runtime.model.load import load
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import NoDrafter, Request
    from runtime.speculative.draft_length import Controller

    torch.manual_seed(0)
    model = load(target, threads=threads)
    items = random_items(model.decoder.vocab_size, count, 0)
    plain = Job(model.decoder, NoDrafter(), items, new_tokens, 1, Sampling(), "coupled", None)
    # By drafter of first and of later texts: of each turn the seconds, and the processor's.
    took: dict[str, tuple[list[Taken], list[Taken]]] = {kind: ([], []) for kind in ("", *kinds)}
    with TemporaryDirectory(prefix="specpress-heads-") as folder:
        small = load(draft, threads=threads) if "oracle" in kinds else None
        drafters: dict[str, Drafter] = {"": NoDrafter()}
        drafters |= {kind: drafter_of(kind, model, plain, Path(folder), small) for kind in kinds}
        cache = model.decoder.new_cache()
        for number in range(rounds + 1):
            controllers = {kind: Controller() for kind in kinds}
            for text in range(2 * count):
                tokens = items[text % count].tokens
                # Each begins first as often as last: where a cache's memory lies makes some percent, too.
                order = list(drafters) if (number + text) % 2 else list(reversed(drafters))
                engines: dict[str, tuple[Engine, Request]] = {}
                for kind in order:
                    engine = Engine(model.decoder, drafters[kind], controllers.get(kind, 0), plain.rule, cache)
                    request = Request(0, list(tokens), len(tokens), plain.sampling, new_tokens)
                    engine.add(request, Metrics())
                    engines[kind] = engine, request
                for kind, turns in _in_turns(engines).items() if number else ():
                    took[kind][text >= count].extend(turns)
    return {
        kind: (
            _over(first, took[""][0], lambda one: one.seconds),
            _over(after, took[""][1], lambda one: one.seconds),
            _over(first + after, took[""][0] + took[""][1], lambda one: one.processor),
        )
        for kind, (first, after) in took.items()
        if kind
    }


def _in_turns(engines: "dict[str, tuple[Engine, Request]]") -> dict[str, list[Taken]]:
    """What each turn took of each, while all write their texts."""
    took: dict[str, list[Taken]] = {kind: [] for kind in engines}
    order = list(engines)
    while any(engine.busy for engine, _ in engines.values()):
        for kind in order:
            engine, request = engines[kind]
            end = TURN * (1 + len(took[kind]))
            began, spent = time.perf_counter(), time.process_time()
            while engine.busy and len(request.new_tokens) < end:
                engine.step()
            took[kind].append(Taken(time.perf_counter() - began, time.process_time() - spent))
        order.reverse()
    return took


def _over(turns: list[Taken], plain: list[Taken], of: "Callable[[Taken], float]") -> float:
    """The geometric mean of what turns took over plain decoding's same ones, each within MOST."""
    ratios = (of(one) / of(other) for one, other in zip(turns, plain, strict=True))
    return geometric_mean(min(MOST, max(1 / MOST, ratio)) for ratio in ratios)


@app.command()
def main(
    target: Annotated[Path, typer.Option(help="A model directory.")] = PAIR / "target",
    draft: Annotated[Path, typer.Option(help="The oracle's model.")] = PAIR / "draft",
    shape: Annotated[str | None, typer.Option(help="A published model's sizes at int4 instead, of both.")] = None,
    kinds: Annotated[str, typer.Option(help="Of which drafters, with commas.")] = ",".join(KINDS),
    count: Annotated[int, typer.Option(help="Texts.", min=1)] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each.", min=16)] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one that does not.", min=1)] = 7,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
) -> None:
    """Prints what each drafter costs in percent of plain decoding's time."""
    from rich.table import Table

    from runtime.bench.output import console
    from runtime.bench.random_models import write_shape

    with without_traceback(), TemporaryDirectory(prefix="specpress-shape-") as folder:
        if shape is not None:
            target = draft = write_shape(shape, "int4", Path(folder) / shape)
        found = measured(target, draft, kinds.split(","), count, new_tokens, rounds, threads)
        table = Table("drafter", "first", "after", "processor time of both")
        for kind, ratios in found.items():
            table.add_row(kind, *(f"{100 * (ratio - 1):+.1f} %" for ratio in ratios))
        console().print(table)


if __name__ == "__main__":
    app()
