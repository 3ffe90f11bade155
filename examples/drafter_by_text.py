"""What choosing a drafter by text gains and costs, beside each of the drafters alone, on four kinds of text.

    python examples/drafter_by_text.py
    python examples/drafter_by_text.py --target runs/int8/model --draft org/smaller --rounds 9

The kinds: code that repeats what stands above it, new code, prose (comments), and code at temperature 1; all begun with
pieces of Python's own library. A text is decoded in all ways at once, in one cache: each round is had by whoever has
come the least far, so that a machine which changes its pace from second to second changes all alike, and their weights
and keys lie where the others' do. "Whole": the kinds one after the other, as a server gets them.

Each trial is a process of its own, and the median one counts: it is luck what a drafter seemed to be worth at first.
All rounds of a trial count alike, for looking at other drafters costs a little now and then, which no median would see.
"""

import json
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from runtime.model.load import Model
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import Drafter
    from runtime.speculative.draft_length import Controller

    Way = tuple[Drafter, Controller]

PAIR = Path(__file__).parent / "pair"
KINDS = ("repeating", "code", "prose", "sampled")
MODULES = ("argparse", "ast", "decimal", "difflib", "doctest", "inspect", "pickle", "tarfile")
# Seconds by kind of text and by drafter, of each text those of each round.
Seconds = dict[str, dict[str, list[list[float]]]]
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def prompts(count: int, seed: int) -> dict[str, list[str]]:
    """`count` beginnings of each kind of text."""
    drawn, library = random.Random(seed), Path(sysconfig.get_paths()["stdlib"])
    texts = [
        (library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES if (library / f"{name}.py").exists()
    ]
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for _ in range(count):
        starts: list[int] = []
        while not starts:  # a module of few functions has none that far from its end
            lines = drawn.choice(texts).splitlines()
            starts = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ")][:-20]
        at = drawn.choice(starts)
        piece = "\n".join(lines[at : at + 20])
        found["repeating"].append(f"{piece}\n\n# The same again:\n{piece[:40]}")
        found["code"].append("\n".join(lines[at : at + 8]))
        found["sampled"].append(found["code"][-1])
        prose = [line for line in lines if line.lstrip().startswith("#") and len(line) > 40]
        place = drawn.randrange(max(1, len(prose) - 4))
        found["prose"].append(
            "\n".join(line.lstrip() for line in prose[place : place + 4]) or "# A note on what follows"
        )
    return found


def side_by_side(
    model: "Model", ways: dict[str, "Way"], text: list[int], sampling: "Sampling", new_tokens: int
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """A text decoded in all ways at once, each round by whoever is the furthest behind: seconds and tokens by way."""
    from runtime.engine.engine import Engine
    from runtime.engine.metrics import Metrics
    from runtime.speculative.draft import Request

    cache, engines, requests = model.decoder.new_cache(), {}, {}
    for name, (drafter, controller) in ways.items():
        engines[name] = Engine(model.decoder, drafter, controller, "coupled", cache, max_batch=1)
        requests[name] = Request(0, list(text), len(text), sampling, new_tokens)
        engines[name].add(requests[name], Metrics())
    seconds = dict.fromkeys(ways, 0.0)
    while busy := [name for name in ways if engines[name].busy]:
        behind = min(busy, key=lambda name: len(requests[name].tokens))
        began = time.perf_counter()
        engines[behind].step()
        seconds[behind] += time.perf_counter() - began
    return seconds, {name: request.new_tokens for name, request in requests.items()}


def measured(
    target: str, draft: str, names: list[str], count: int, new_tokens: int, rounds: int, seed: int, threads: int | None
) -> tuple[Seconds, int]:
    """The seconds of a trial, and how many texts differ from plain decoding's."""
    from runtime.model.load import load
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import NoDrafter
    from runtime.speculative.draft_length import Controller
    from runtime.speculative.drafters.by_name import make

    model, small = load(target, threads=threads), load(draft, threads=threads)
    texts = {
        kind: [model.tokenizer.encode(text)[-200:] for text in some] for kind, some in prompts(count, seed).items()
    }
    ways = {name: (NoDrafter() if name == "none" else make(model, name, small), Controller()) for name in names}
    seconds: Seconds = {kind: {name: [[] for _ in range(count)] for name in names} for kind in KINDS}
    differ = 0
    for number in range(rounds + 1):
        for kind in KINDS:
            sampling = Sampling(temperature=1.0, seed=seed) if kind == "sampled" else Sampling()
            for place, text in enumerate(texts[kind]):
                turns = ways if (number + place) % 2 else dict(reversed(ways.items()))
                took, tokens = side_by_side(model, turns, text, sampling, new_tokens)
                differ += sum(one != tokens["none"] for one in tokens.values())
                for name, each in took.items() if number else ():
                    seconds[kind][name][place].append(each)
    return seconds, differ


def in_a_process(given: list[str], options: dict[str, object]) -> tuple[Seconds, int]:
    """`measured` by this file in a process of its own; `given`: the drafters to choose among."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, f"--drafters={','.join(given)}", "--trials=1", "--json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)  # it has said why
    found = json.loads(done.stdout)
    return found["seconds"], found["differ"]


@app.command()
def main(
    target: Annotated[str, typer.Option(help="A model directory, a run folder, or a hub name.")] = str(PAIR / "target"),
    draft: Annotated[str, typer.Option(help="The draft model.")] = str(PAIR / "draft"),
    drafters: Annotated[str, typer.Option(help="Those to choose among, with commas.")] = "model,lookup+model,lookup",
    count: Annotated[int, typer.Option(help="Texts of each kind.", min=1)] = 6,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=16)] = 160,
    rounds: Annotated[int, typer.Option(help="Rounds of a trial that count, after one that does not.", min=1)] = 5,
    trials: Annotated[int, typer.Option(help="Trials, each a process that learns anew.", min=1)] = 5,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the seconds of each text and round.")] = False,
) -> None:
    """Prints tokens per second over plain decoding, of each drafter and of who chooses among them."""
    from rich.table import Table

    from runtime.bench.output import console

    with without_traceback():
        among = drafters.split(",")
        names = ["none", *among, drafters]
        options = {"target": target, "draft": draft, "count": count, "new_tokens": new_tokens, "rounds": rounds}
        options |= {"seed": seed} | ({} if threads is None else {"threads": threads})
        if trials == 1:
            found = [measured(target, draft, names, count, new_tokens, rounds, seed, threads)]
        else:
            found = [in_a_process(among, options) for _ in range(trials)]
        differ = sum(one for _, one in found)
        if as_json:
            together: Seconds = {
                kind: {name: [one for seconds, _ in found for one in seconds[kind][name]] for name in names}
                for kind in KINDS
            }
            print(json.dumps({"seconds": together, "differ": differ}))
            return
        table = Table("text", *among, "chosen", "over the best of them", "trials")
        for row, kinds in {**{kind: (kind,) for kind in KINDS}, "whole": KINDS}.items():
            gains = {name: median(_over_plain(seconds, kinds, name) for seconds, _ in found) for name in names[1:]}
            best = max(among, key=gains.__getitem__)
            each = sorted(
                _over_plain(seconds, kinds, drafters) / _over_plain(seconds, kinds, best) for seconds, _ in found
            )
            shown = (f"{gains[name]:.2f} ×" for name in names[1:])
            table.add_row(row, *shown, f"{median(each):.3f}", f"{each[0]:.3f} to {each[-1]:.3f}")
        console().print(table)
        print(f"{differ} texts differ from plain decoding's")


def _over_plain(seconds: Seconds, kinds: Iterable[str], name: str) -> float:
    """How many times as fast a drafter was in a trial as plain decoding, over all texts of these kinds."""
    plain, own = (sum(sum(map(sum, seconds[kind][one])) for kind in kinds) for one in ("none", name))
    return plain / own


if __name__ == "__main__":
    app()
