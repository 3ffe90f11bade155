"""`python -m runtime.bench speculate` and `load`: whole texts through the engine, with and without speculation."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.commands import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench_speculate import Job
    from runtime.costs import StepCosts
    from runtime.drafters import Drafter
    from runtime.loading import Model
    from runtime.verify import Rule

# Prompts of models without a tokenizer: random tokens.
_RANDOM_PROMPT, _RANDOM_PROMPTS = 64, 8
_COST_SECONDS = 5.0

_Target = Annotated[str | None, typer.Option(help="A model directory or run folder; or name a --shape.")]
_Shape = Annotated[str | None, typer.Option(help="A shape with random weights instead: speed only.")]
_Scheme = Annotated[str, typer.Option(help="Of --shape: f32, bf16, int8, int4, nf4 or ternary.")]
_Drafter = Annotated[
    str | None,
    typer.Option(
        help="none, model, tree, lookup, suffix, nested, two of them with a plus between, or oracle (oracle+nested: at"
        " the nested drafter's cost).",
        show_default="model where there is a draft, else lookup",
    ),
]
_Draft = Annotated[str | None, typer.Option(help="The draft's directory, or a shape's name.")]
_Alpha = Annotated[float, typer.Option(help="The oracle's acceptance per token.")]
_Corpus = Annotated[Path | None, typer.Option(help="A text for the drafter suffix.")]
_Prompts = Annotated[
    Path | None, typer.Option(help="A text or .jsonl file; Spec-Bench's and HumanEval's too.", show_default="random")
]
_Count = Annotated[int | None, typer.Option(help="Only so many prompts, spread over the groups.")]
_NewTokens = Annotated[int, typer.Option(help="Tokens of each text; stop tokens do not end it.")]
_Temperature = Annotated[float, typer.Option(help="0: greedy.")]
_Seed = Annotated[int, typer.Option(help="Of sampling, random prompts, the oracle and arrivals.")]
_Verify = Annotated[str, typer.Option(help="coupled or rejection, for temperatures above 0.")]
_Gamma = Annotated[
    int | None, typer.Option(help="Tokens drafted a round.", show_default="what pays most, chosen every round")
]
_Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")]
_Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def speculate(
    target: _Target = None,
    shape: _Shape = None,
    scheme: _Scheme = "int4",
    drafter: _Drafter = None,
    draft: _Draft = None,
    alpha: _Alpha = 0.8,
    corpus: _Corpus = None,
    prompts: _Prompts = None,
    count: _Count = None,
    new_tokens: _NewTokens = 128,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    verify: _Verify = "coupled",
    draft_length: _Gamma = None,
    rounds: Annotated[int, typer.Option(help="Passes over the prompts, plain and speculative in turns.")] = 3,
    threads: _Threads = None,
    json_file: _Json = None,
) -> None:
    """Measures speculative against plain decoding of the same target: speed, acceptance, prediction, mismatches."""
    with without_traceback():
        from runtime.bench_speculate import measure, row
        from runtime.speculate import NoDrafter

        _check({"--rounds": rounds, "--batch": batch, "--new-tokens": new_tokens}, count, json_file)
        with _job(
            target, shape, scheme, drafter, draft, alpha, corpus, prompts, count, new_tokens, batch, temperature, seed,
            verify, draft_length, threads,
        ) as (job, model, draft_model):  # fmt: skip
            plain, spoken = measure(job, NoDrafter(), rounds, _say)
            # A draft step is a forward of the draft only where every drafted token takes one.
            steps = draft_model if job.drafter.name in ("model", "oracle") else None
            costs = _costs(job, model, steps) if batch == 1 else None
            found = row(job, plain, spoken, costs)
            _show(_facts(job, model), found)
            if json_file is not None:
                _write(json_file, _facts(job, model) | {"result": found})


def load(
    rate: Annotated[float, typer.Option(help="Requests a second, on average.", show_default=False)],
    target: _Target = None,
    shape: _Shape = None,
    scheme: _Scheme = "int4",
    drafter: _Drafter = None,
    draft: _Draft = None,
    alpha: _Alpha = 0.8,
    corpus: _Corpus = None,
    prompts: _Prompts = None,
    count: _Count = None,
    new_tokens: _NewTokens = 64,
    batch: Annotated[int, typer.Option(help="The most requests in one forward.")] = 16,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    verify: _Verify = "coupled",
    draft_length: _Gamma = None,
    requests: Annotated[int, typer.Option(help="Requests of one run.")] = 50,
    max_latency: Annotated[float | None, typer.Option(help="Seconds that P90 latency must stay under.")] = None,
    max_ttft: Annotated[
        float | None, typer.Option(help="Seconds that P90 time to first token must stay under.")
    ] = None,
    threads: _Threads = None,
    json_file: _Json = None,
) -> None:
    """Sends requests in a Poisson process; with a bound finds the highest rate that stays under it."""
    with without_traceback():
        from dataclasses import asdict

        from runtime.bench_load import Bound, highest_rate, serve
        from runtime.bench_speculate import Way, run_once
        from runtime.controller import Controller
        from runtime.speculate import NoDrafter

        _check({"--requests": requests, "--batch": batch, "--new-tokens": new_tokens}, count, json_file)
        for option, value in (("--rate", rate), ("--max-latency", max_latency), ("--max-ttft", max_ttft)):
            if value is not None and not 0 < value < 1e6:
                raise UserError(f"{option} must be above 0, found {value:g}")
        bound = Bound(*(None if limit is None else limit * 1e3 for limit in (max_latency, max_ttft)))
        with _job(
            target, shape, scheme, drafter, draft, alpha, corpus, prompts, count, new_tokens, batch, temperature, seed,
            verify, draft_length, threads,
        ) as (job, model, _):  # fmt: skip
            cache = job.decoder.new_cache()
            length: int | Controller = Controller() if job.draft_length is None else job.draft_length
            results = {}
            for name, way in (
                ("plain", Way(NoDrafter(), 0, cache)),
                (job.drafter.name, Way(job.drafter, length, cache)),
            ):
                run_once(job, way, count=1)

                def run(at: float, way: Way = way, name: str = name) -> Any:
                    _say(f"{name}: {at:.3g} requests a second")
                    return serve(job, way, at, requests, seed)

                held: float | None = None
                tried: Sequence[Any] = []
                if max_latency is None and max_ttft is None:
                    tried = [run(rate)]
                else:
                    held, tried = highest_rate(run, rate, bound)
                results[name] = {"highest_rate": held, "runs": [asdict(one) for one in tried]}
            _show_load(_facts(job, model), results)
            if json_file is not None:
                _write(json_file, _facts(job, model) | {"bound_ms": asdict(bound), "result": results})


@contextmanager
def _job(
    target: str | None,
    shape: str | None,
    scheme: str,
    drafter: str | None,
    draft: str | None,
    alpha: float,
    corpus: Path | None,
    prompts: Path | None,
    count: int | None,
    new_tokens: int,
    batch: int,
    temperature: float,
    seed: int,
    verify: str,
    draft_length: int | None,
    threads: int | None,
) -> Iterator[tuple["Job", "Model", "Model | None"]]:
    """Loads what is to be measured. Raises UserError for whatever does not fit together."""
    from tempfile import TemporaryDirectory

    from runtime.bench_speculate import Job
    from runtime.loading import load
    from runtime.sampling import Sampling
    from runtime.shapes import SHAPES, write_shape
    from runtime.speculate import MAX_DRAFT_LENGTH

    if (target is None) == (shape is None):
        raise UserError("name either a --target or a --shape to measure")
    if verify not in ("coupled", "rejection"):
        raise UserError(f"--verify must be coupled or rejection, found {verify!r}")
    if draft_length is not None and not 0 <= draft_length <= MAX_DRAFT_LENGTH:
        raise UserError(f"--draft-length must be from 0 to {MAX_DRAFT_LENGTH}, found {draft_length}")
    rule: Rule = "coupled" if verify == "coupled" else "rejection"
    sampling = Sampling(temperature, seed=seed)
    kinds = [] if drafter is None else drafter.split("+")
    with TemporaryDirectory(prefix="specpress-bench-") as folder:

        def opened(name: str, role: str, is_shape: bool, planes: bool = False) -> "Model":
            path = write_shape(name, scheme, Path(folder) / f"{role}-{name}") if is_shape else name
            return load(path, threads=threads, planes=planes)

        model = opened(shape or str(target), "target", shape is not None, planes="nested" in kinds)
        source = draft if draft is not None or model.draft_path is None else str(model.draft_path)
        if not kinds:
            kinds = ["lookup" if source is None else "model"]
        draft_model = None
        if kinds == ["oracle", "nested"]:
            from runtime.drafters.nested import upper_half

            kinds, draft_model = ["oracle"], replace(model, decoder=upper_half(model))
        elif {"model", "tree", "oracle"} & set(kinds):
            if source is None:
                raise UserError(f"--drafter {'+'.join(kinds)} needs a draft; give --draft DIR or a shape's name")
            draft_model = opened(source, "draft", source in SHAPES)
        if draft is not None and (draft_model is None or draft_model.decoder is model.decoder):
            raise UserError(f"--draft names a model, but --drafter is {'+'.join(kinds)}; leave out one of the two")
        items = _items(model, prompts, count, new_tokens, seed)
        stop: frozenset[int] = frozenset()
        job = Job(model.decoder, _NOTHING, items, new_tokens, batch, sampling, rule, draft_length, stop)
        made = _drafter(job, model, draft_model, kinds, alpha, corpus, rule, seed)
        yield replace(job, drafter=made), model, draft_model


_NOTHING: Any = None


def _items(model: "Model", prompts: Path | None, count: int | None, new_tokens: int, seed: int) -> tuple[Any, ...]:
    from runtime.bench_prompts import read_prompts
    from runtime.bench_speculate import Item

    if prompts is None:
        import numpy as np

        rng = np.random.default_rng(seed)
        draws = rng.integers(0, model.decoder.vocab_size, (count or _RANDOM_PROMPTS, _RANDOM_PROMPT))
        return tuple(Item(row, "random tokens") for row in draws.tolist())
    found = read_prompts(prompts)
    if count is not None and count < len(found):
        found = [found[i * len(found) // count] for i in range(count)]
    decoder = model.decoder
    items = [Item(model.tokenizer(one.text)["input_ids"], one.group) for one in found]
    fitting = [item for item in items if len(item.tokens) + new_tokens <= decoder.max_positions]
    if len(fitting) < len(items):
        typer.echo(
            f"{len(items) - len(fitting)} of {len(items)} prompts are left out: with {new_tokens} new tokens they are"
            f" longer than the target's {decoder.max_positions} positions",
            err=True,
        )
    if not fitting:
        raise UserError("--prompts: no prompt is short enough for the target; give shorter ones or lower --new-tokens")
    return tuple(fitting)


def _drafter(
    job: "Job",
    model: "Model",
    draft: "Model | None",
    kinds: Sequence[str],
    alpha: float,
    corpus: Path | None,
    rule: "Rule",
    seed: int,
) -> "Drafter":
    from runtime.drafters.choose import make

    if "oracle" not in kinds:
        return make(model, kinds, draft, corpus, rule)
    from runtime.bench_speculate import Way, run_once
    from runtime.drafters.oracle import OracleDrafter
    from runtime.speculate import NoDrafter

    if len(kinds) > 1:
        raise UserError("--drafter oracle goes alone: it knows every token")
    assert draft is not None
    if not job.sampling.greedy:
        raise UserError("--drafter oracle knows the greedy text only; leave out --temperature")
    _say("plain texts for the oracle")
    plain = run_once(job, Way(NoDrafter(), 0, job.decoder.new_cache()))
    known = {tuple(item.tokens): text for item, text in zip(job.items, plain.tokens, strict=True)}
    return OracleDrafter(draft, known, alpha, seed, job.decoder.vocab_size)


def _costs(job: "Job", model: "Model", draft: "Model | None") -> "StepCosts":
    from runtime.costs import measure_costs

    text = job.items[0].tokens[: max(1, min(128, model.decoder.max_positions // 2))]
    gamma = 4 if job.draft_length is None else job.draft_length
    return measure_costs(model, draft, text, gamma, _COST_SECONDS)


def _check(counts: dict[str, int], prompts: int | None, json_file: Path | None) -> None:
    for option, value in (counts | ({} if prompts is None else {"--count": prompts})).items():
        if value < 1:
            raise UserError(f"{option} must be at least 1, found {value}")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(f"--json: {json_file} cannot be a file: it is a folder, or lies in none; name another")


def _facts(job: "Job", model: "Model") -> dict[str, Any]:
    from runtime.bench_rounds import machine

    return {
        "machine": machine(),
        "target": model.path.name,
        "random_weights": not (model.path / "tokenizer.json").exists(),
        "kernels": model.decoder.kernels,
        "threads": model.decoder.threads,
        "protocol": "plain and speculative passes over all prompts in turns; tokens/s with the prompts' time; medians",
    }


def _say(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _write(path: Path, content: dict[str, Any]) -> None:
    from runtime.bench_output import write

    write(path, content)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _show(facts: dict[str, Any], found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print(_title(facts), soft_wrap=True)
    gamma = "chosen" if found["draft_length"] is None else found["draft_length"]
    console.print(
        f"drafter {found['drafter']}, γ {gamma}, batch {found['batch']}, temperature {found['temperature']:g}"
        f" ({found['verify']}), {found['prompts']} prompts, {found['rounds']} rounds\n",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    for name in ("group", "prompts", "tokens/s", "speedup", "α", "τ"):
        table.add_column(name, justify="left" if name == "group" else "right")
    whole = {"name": "all", "tokens_per_second": found["speculative"]["tokens_per_second"]}
    rows = [found | whole, *(found["groups"] if len(found["groups"]) > 1 else [])]
    for row in rows:
        table.add_row(
            row["name"],
            str(row["prompts"]),
            _number(row["tokens_per_second"], ".1f"),
            _number(row["speedup"], ".2f"),
            _number(row["acceptance_rate"], ".3f"),
            _number(row["tokens_per_round"], ".2f"),
        )
    console.print(table)
    plain, itl, ttft = found["plain"], found["speculative"]["itl_ms"], found["ttft_ms"]
    lines = (
        f"plain {plain['tokens_per_second']:.1f} tokens/s; speedup without the prompts' time"
        f" {_number(found['decode_speedup'], '.2f')}, predicted {_number(found['predicted_speedup'], '.2f')}"
        " (a draft step costs"
        f" {_number(found['draft_cost_ratio'], '.3f')} of a target step;"
        f" {_number(found['drafted_per_round'], '.2f')} drafted a round)",
        f"{_number(found['mismatches'], 'd')} of {found['prompts']} texts differ from plain decoding's",
        f"first token {_number(ttft['p50'], '.1f')} ms (p50), {_number(ttft['p90'], '.1f')} (p90); between tokens"
        f" {_number(itl['p50'], '.2f')} (p50), {_number(itl['p99'], '.2f')} (p99)",
        f"keys and values: {found['kv_bytes_per_token']:,} bytes a token",
    )
    console.print("\n".join(lines), soft_wrap=True)


def _show_load(facts: dict[str, Any], results: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(_title(facts), soft_wrap=True)
    table = Table(box=box.SIMPLE)
    columns = (
        "way",
        "asked/s",
        "served/s",
        "tokens/s",
        "latency p50",
        "p90",
        "ttft p50",
        "p90",
        "itl p50",
        "p99",
        "batch",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, found in results.items():
        for run in found["runs"]:
            times: Sequence[float | None] = (
                run["latency_ms"]["p50"], run["latency_ms"]["p90"], run["ttft_ms"]["p50"], run["ttft_ms"]["p90"],
                run["itl_ms"]["p50"], run["itl_ms"]["p99"],
            )  # fmt: skip
            table.add_row(
                name,
                f"{run['rate']:.2f}",
                f"{run['requests_per_second']:.2f}",
                f"{run['tokens_per_second']:.1f}",
                *(_number(value, ".1f") for value in times),
                f"{run['mean_batch']:.1f}",
            )
    console.print(table)
    for name, found in results.items():
        if found["highest_rate"] is not None:
            console.print(f"{name}: highest rate under the bound {found['highest_rate']:.2f} requests/s")


def _title(facts: dict[str, Any]) -> str:
    weights = ", random weights: speed only" if facts["random_weights"] else ""
    return (
        f"{facts['target']}{weights}. {facts['machine']['cpu']}, {facts['threads']} threads,"
        f" {facts['kernels']} kernels. Milliseconds; the prompt's time is included."
    )
