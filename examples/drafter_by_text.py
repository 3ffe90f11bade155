"""What choosing a drafter by text gains and costs, beside each of the drafters alone, on four kinds of text.

    python examples/drafter_by_text.py
    python examples/drafter_by_text.py --target runs/int8/model --draft org/smaller --rounds 9

The kinds: code that repeats what stands above it, new code, prose (comments), and code at temperature 1; all begun with
pieces of Python's own library. Of each kind every way of drafting takes its turn in each round, so that a machine which
changes its pace changes all. "Whole": the kinds one after the other, as a server gets them.

Each trial is a process of its own, and the median one counts: it is luck what a drafter seemed to be worth at first,
and the same code on the same texts is some percent faster in one process than in the next, by where its memory lies.
"""

import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from runtime.cli import without_traceback

PAIR = Path(__file__).parent / "pair"
KINDS = ("repeating", "code", "prose", "sampled")
MODULES = ("argparse", "ast", "decimal", "difflib", "doctest", "inspect", "pickle", "tarfile")
# Tokens per second by kind of text and by drafter, one of each round.
Speeds = dict[str, dict[str, list[float]]]
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
    target: str, draft: str, names: list[str], count: int, new_tokens: int, rounds: int, seed: int
) -> tuple[Speeds, int]:
    """Tokens per second of each round of a trial, by kind of text and drafter, and how many texts differ from plain
    decoding's."""
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
    ways = {
        name: Way(NoDrafter() if name == "none" else make(model, name, small), Controller(), model.decoder.new_cache())
        for name in names
    }
    speeds: Speeds = {kind: {name: [] for name in names} for kind in (*KINDS, "whole")}
    differ = 0
    for number in range(rounds + 1):
        taken, made = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for kind in KINDS:
            sampling = Sampling(temperature=1.0, seed=seed) if kind == "sampled" else Sampling()
            turns = {
                name: run_once(replace(job, sampling=sampling), way, items[kind])
                for name, way in (ways.items() if number % 2 else reversed(ways.items()))
            }
            for name, one in turns.items():
                tokens = sum(map(len, one.tokens))
                taken[name], made[name] = taken[name] + one.seconds, made[name] + tokens
                if number:
                    speeds[kind][name].append(tokens / one.seconds)
                differ += sum(a != b for a, b in zip(one.tokens, turns["none"].tokens, strict=True))
        for name in names if number else ():
            speeds["whole"][name].append(made[name] / taken[name])
    return speeds, differ


def in_a_process(given: list[str], options: dict[str, object]) -> tuple[Speeds, int]:
    """`measured` by this file in a process of its own; `given`: the drafters to choose among."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, __file__, f"--drafters={','.join(given)}", "--trials=1", "--json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)  # it has said why
    found = json.loads(done.stdout)
    return found["speeds"], found["differ"]


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
    as_json: Annotated[bool, typer.Option("--json", help="Print the tokens per second of each round.")] = False,
) -> None:
    """Prints tokens per second over plain decoding, of each drafter and of who chooses among them."""
    from rich.console import Console
    from rich.table import Table

    with without_traceback():
        among = drafters.split(",")
        names = ["none", *among, drafters]
        options = {"target": target, "draft": draft, "count": count, "new_tokens": new_tokens, "rounds": rounds}
        if trials == 1:
            found = [measured(target, draft, names, count, new_tokens, rounds, seed)]
        else:
            found = [in_a_process(among, {**options, "seed": seed}) for _ in range(trials)]
        differ = sum(one for _, one in found)
        if as_json:
            together = {
                kind: {name: [one for speeds, _ in found for one in speeds[kind][name]] for name in names}
                for kind in (*KINDS, "whole")
            }
            print(json.dumps({"speeds": together, "differ": differ}))
            return
        table = Table("text", *among, "chosen", "over the best of them", "trials")
        for kind in (*KINDS, "whole"):
            gains = {name: median(_over(speeds[kind], name, "none") for speeds, _ in found) for name in names[1:]}
            best = max(among, key=gains.__getitem__)
            each = sorted(_over(speeds[kind], drafters, best) for speeds, _ in found)
            shown = (f"{gains[name]:.2f} ×" for name in names[1:])
            table.add_row(kind, *shown, f"{median(each):.3f}", f"{each[0]:.3f} to {each[-1]:.3f}")
        Console().print(table)
        print(f"{differ} texts differ from plain decoding's")


def _over(speeds: dict[str, list[float]], name: str, other: str) -> float:
    """The median over a trial's rounds of one drafter's speed over another's."""
    return median(a / b for a, b in zip(speeds[name], speeds[other], strict=True))


if __name__ == "__main__":
    app()
