"""What choosing a drafter by text gains and costs, beside each of the drafters alone, on four kinds of text.

    python examples/drafter_by_text.py
    python examples/drafter_by_text.py --target runs/int8/model --draft org/smaller --rounds 9

The kinds: code that repeats what stands above it, new code, prose (comments), and code at temperature 1; all begun with
pieces of Python's own library. Every way of drafting takes its turn in each round, so that a machine which changes its
pace changes all. What it has learned of its drafters stays for the rounds of a trial; each trial learns anew, for it is
luck what a drafter seemed to be worth at first. "Whole": the kinds one after the other, as a server gets them.
"""

import random
import sysconfig
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from runtime.cli import without_traceback

PAIR = Path(__file__).parent / "pair"
KINDS = ("repeating", "code", "prose", "sampled")
MODULES = ("argparse", "ast", "decimal", "difflib", "doctest", "inspect", "pickle", "tarfile")
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


def measured(
    target: str, draft: str, names: list[str], count: int, new_tokens: int, rounds: int, trials: int, seed: int
) -> tuple[dict[str, dict[str, list[float]]], int]:
    """Tokens per second of each round, trial after trial, by kind of text and drafter; and how many texts differ from
    plain decoding's."""
    from dataclasses import replace

    from runtime.bench.speculate import Item, Job, Way, run_once
    from runtime.model.load import load
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import NoDrafter
    from runtime.speculative.draft_length import Controller
    from runtime.speculative.drafters.by_name import make

    model, small = load(target), load(draft)
    begun = prompts(count, seed)
    items = {k: [Item(model.tokenizer.encode(text)[-200:], k) for text in texts] for k, texts in begun.items()}
    job = Job(model.decoder, NoDrafter(), (), new_tokens, 1, Sampling(), "coupled", None)
    speeds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in (*KINDS, "whole")}
    differ = 0
    for _ in range(trials):
        ways = {
            name: Way(
                NoDrafter() if name == "none" else make(model, name, small), Controller(), model.decoder.new_cache()
            )
            for name in names
        }
        for number in range(rounds + 1):
            texts: dict[str, list[list[int]]] = {}
            for name, way in ways.items() if number % 2 else reversed(ways.items()):
                taken, made = 0.0, list[list[int]]()
                for kind in KINDS:
                    sampling = Sampling(temperature=1.0, seed=seed) if kind == "sampled" else Sampling()
                    one = run_once(replace(job, sampling=sampling), way, items[kind])
                    taken, made = taken + one.seconds, [*made, *one.tokens]
                    if number:
                        speeds[kind][name].append(sum(map(len, one.tokens)) / one.seconds)
                texts[name] = made
                if number:
                    speeds["whole"][name].append(sum(map(len, made)) / taken)
            differ += sum(a != b for made in texts.values() for a, b in zip(made, texts["none"], strict=True))
    return speeds, differ


@app.command()
def main(
    target: Annotated[str, typer.Option(help="A model directory, a run folder, or a hub name.")] = str(PAIR / "target"),
    draft: Annotated[str, typer.Option(help="The draft model.")] = str(PAIR / "draft"),
    drafters: Annotated[str, typer.Option(help="Those to choose among, with commas.")] = "model,lookup+model,lookup",
    count: Annotated[int, typer.Option(help="Texts of each kind.", min=1)] = 6,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=16)] = 160,
    rounds: Annotated[int, typer.Option(help="Rounds of a trial that count, after one that does not.", min=1)] = 7,
    trials: Annotated[int, typer.Option(help="Trials, each of which learns of its drafters anew.", min=1)] = 3,
    seed: int = 0,
) -> None:
    """Prints tokens per second over plain decoding, of each drafter and of who chooses among them."""
    from rich.console import Console
    from rich.table import Table

    with without_traceback():
        names = ["none", *drafters.split(","), drafters]
        speeds, differ = measured(target, draft, names, count, new_tokens, rounds, trials, seed)
        table = Table("text", *names[1:-1], "chosen", "over the best of them", "trials")
        for kind, found in speeds.items():
            plain = found["none"]
            gains = {name: median(a / b for a, b in zip(found[name], plain, strict=True)) for name in names[1:]}
            best = max(names[1:-1], key=gains.__getitem__)
            ratios = [a / b for a, b in zip(found[drafters], found[best], strict=True)]
            each = sorted(median(ratios[i : i + rounds]) for i in range(0, len(ratios), rounds))
            shown = (f"{gains[name]:.2f} ×" for name in names[1:])
            table.add_row(kind, *shown, f"{median(ratios):.3f}", f"{each[0]:.3f} to {each[-1]:.3f}")
        Console().print(table)
        print(f"{differ} texts differ from plain decoding's")


if __name__ == "__main__":
    app()
