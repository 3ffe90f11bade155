"""What a block drafter saves whose head has rows for frequent tokens alone, and what falling back to all of them costs.

    python examples/short_head.py --shape tinyllama-1.1b --tokens 4096,8192
    python examples/short_head.py --shape qwen3-4b --layers 4 --tokens 16384,32768

A target and a drafter of random weights, in turns: one draft of eight tokens by the whole head and by short ones, the
target's own head for one row, which is what an unsure first token asks for, and a step of plain decoding. "Pays up to"
is the share of drafts that may fall back before the short head costs more than the whole one.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from runtime.model.load import Model
    from runtime.speculative.drafters.block_network import BlockNetwork

NODES, WIDTH = 8, 128
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def drafting(network: "BlockNetwork") -> Callable[[], None]:
    """Makes one draft behind a text of which one state is new each time; it is sure, and so never falls back."""
    import numpy as np
    import torch

    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import Request, TakenStates
    from runtime.speculative.drafters.block import BlockDrafter

    memory, about = network.memory, network.about
    parts = np.zeros_like(memory.sure[0]), np.zeros_like(memory.sure[1])
    drafter = BlockDrafter(replace(network, memory=replace(memory, sure=(*parts, 0.0, 3.0))))
    request = Request(1, list(range(1, WIDTH + 1)), WIDTH, Sampling(), 1 << 20)
    drafter.read([TakenStates(request, 0, torch.randn(WIDTH - 1, len(about.taps) * about.hidden_size))])

    def draft() -> None:
        [found] = drafter.propose([request], [NODES])
        request.tokens.append(found.tokens[0])
        states = torch.randn(1, len(about.taps) * about.hidden_size)
        drafter.read([TakenStates(request, len(request.tokens) - 2, states)])

    return draft


def stepping(model: "Model") -> Callable[[], None]:
    """One step of plain decoding behind a text of `WIDTH` tokens."""
    import torch

    from runtime.contract import Rows

    cache = model.decoder.new_cache()
    handle = cache.open(WIDTH + 1)
    model.decoder.forward(torch.arange(1, WIDTH + 1), Rows.chains([(handle, 0, WIDTH)]), cache)

    def step() -> None:
        model.decoder.forward(torch.tensor([1]), Rows.chains([(handle, WIDTH, 1)]), cache)
        cache.truncate(handle, WIDTH)

    return step


def measured(folder: Path, tokens: list[int], rounds: int, threads: int | None) -> dict[str, float]:
    """Median milliseconds of each way, in turns."""
    import numpy as np

    from runtime.bench.replay import random_network
    from runtime.model.load import load

    model = load(folder, threads=threads)
    whole = random_network(model)
    row = np.ones(whole.about.hidden_size, np.float32)
    ways: dict[str, Callable[[], object]] = {"step": stepping(model), "fall-back": lambda: whole.whole_logits(row)}
    ways[str(whole.about.vocab_size)] = drafting(whole)
    ways |= {str(count): drafting(random_network(model, frequent=count)) for count in tokens}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number > 1:
                spent[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(found) for name, found in spent.items()}


@app.command()
def main(
    shape: Annotated[str, typer.Option(help="A published model's sizes.")] = "tinyllama-1.1b",
    scheme: Annotated[str, typer.Option(help="How its weights are packed.")] = "int4",
    layers: Annotated[int | None, typer.Option(help="Its first layers alone.", show_default="all")] = None,
    tokens: Annotated[str, typer.Option(help="Rows of short heads, with commas.")] = "4096,8192",
    rounds: Annotated[int, typer.Option(help="Rounds that count, after two that do not.", min=1)] = 100,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
) -> None:
    """Prints what a draft takes with each head."""
    from rich.console import Console
    from rich.table import Table

    from runtime.bench.random_models import write_shape

    with without_traceback(), TemporaryDirectory(prefix="specpress-head-") as folder:
        path = write_shape(shape, scheme, Path(folder) / shape, layers=layers)
        found = measured(path, [int(count) for count in tokens.split(",")], rounds, threads)
    step, back = found.pop("step"), found.pop("fall-back")
    whole = next(iter(found.values()))
    table = Table("rows of the head", "a draft, ms", "of a step", "of the whole head's", "pays up to")
    for name, spent in found.items():
        short = spent is not whole
        pays = f"{min(1.0, max(0.0, (whole - spent) / back)):.0%} fall back" if short else ""
        table.add_row(name, f"{spent:.2f}", f"{spent / step:.2f}", f"{spent / whole:.2f}", pays)
    console = Console()
    console.print(f"{shape}: a step {step:.2f} ms, a row through the target's own head {back:.2f} ms")
    console.print(table)


if __name__ == "__main__":
    app()
