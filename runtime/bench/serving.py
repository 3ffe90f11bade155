"""`python -m runtime.bench speculate` and `load`: whole texts through the engine, with and without speculation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.cli import without_traceback
from runtime.errors import UserError

_Target = Annotated[str | None, typer.Option(help="A model directory or run folder; or name a --shape.")]
_Shape = Annotated[str | None, typer.Option(help="A shape with random weights instead: speed only.")]
_Scheme = Annotated[str, typer.Option(help="Of --shape: f32, bf16, int8, int4, nf4 or ternary.")]
_Drafter = Annotated[
    str | None,
    typer.Option(
        help="none, model, tree, lookup, suffix, nested, medusa, two of them with a plus between, or oracle"
        " (oracle+nested: at the nested drafter's cost).",
        show_default="model where there is a draft, else lookup",
    ),
]
_Draft = Annotated[str | None, typer.Option(help="The draft's directory, a shape's name, or Medusa heads' directory.")]
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
_Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
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
    device: _Device = "cpu",
    json_file: _Json = None,
) -> None:
    """Measures speculative against plain decoding of the same target: speed, acceptance, prediction, mismatches."""
    with without_traceback():
        from runtime.bench.jobs import Between, facts_of, opened_job, say
        from runtime.bench.output import show_speculation, write
        from runtime.bench.speculate import measure, row
        from runtime.speculate import NoDrafter

        _check({"--rounds": rounds, "--batch": batch, "--new-tokens": new_tokens}, count, json_file)
        with opened_job(
            target, shape, scheme, drafter, draft, alpha, corpus, prompts, count, new_tokens, batch, temperature, seed,
            verify, draft_length, threads, device,
        ) as (job, model):  # fmt: skip
            between = Between(job, model, rounds) if batch == 1 else None
            plain, spoken = measure(job, NoDrafter(), rounds, say, between)
            found = row(job, plain, spoken, None if between is None else between.costs())
            show_speculation(facts_of(job, model), found)
            if json_file is not None:
                write(json_file, facts_of(job, model) | {"result": found})


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
    device: _Device = "cpu",
    json_file: _Json = None,
) -> None:
    """Sends requests in a Poisson process; with a bound finds the highest rate that stays under it."""
    with without_traceback():
        from dataclasses import asdict

        from runtime.bench.jobs import facts_of, opened_job, say
        from runtime.bench.load import Bound, highest_rate, serve
        from runtime.bench.output import show_load, write
        from runtime.bench.speculate import Way, run_once
        from runtime.speculate import NoDrafter
        from runtime.speculative.draft_length import Controller

        _check({"--requests": requests, "--batch": batch, "--new-tokens": new_tokens}, count, json_file)
        for option, value in (("--rate", rate), ("--max-latency", max_latency), ("--max-ttft", max_ttft)):
            if value is not None and not 0 < value < 1e6:
                raise UserError(f"{option} must be above 0, found {value:g}")
        bound = Bound(*(None if limit is None else limit * 1e3 for limit in (max_latency, max_ttft)))
        with opened_job(
            target, shape, scheme, drafter, draft, alpha, corpus, prompts, count, new_tokens, batch, temperature, seed,
            verify, draft_length, threads, device,
        ) as (job, model):  # fmt: skip
            cache = job.decoder.new_cache()
            length: int | Controller = Controller() if job.draft_length is None else job.draft_length
            results = {}
            for name, way in (
                ("plain", Way(NoDrafter(), 0, cache)),
                (job.drafter.name, Way(job.drafter, length, cache)),
            ):
                run_once(job, way, count=1)

                def run(at: float, way: Way = way, name: str = name) -> Any:
                    say(f"{name}: {at:.3g} requests a second")
                    return serve(job, way, at, requests, seed)

                held: float | None = None
                tried: Sequence[Any] = []
                if max_latency is None and max_ttft is None:
                    tried = [run(rate)]
                else:
                    held, tried = highest_rate(run, rate, bound)
                results[name] = {"highest_rate": held, "runs": [asdict(one) for one in tried]}
            show_load(facts_of(job, model), results)
            if json_file is not None:
                write(json_file, facts_of(job, model) | {"bound_ms": asdict(bound), "result": results})


def _check(counts: dict[str, int], prompts: int | None, json_file: Path | None) -> None:
    for option, value in (counts | ({} if prompts is None else {"--count": prompts})).items():
        if value < 1:
            raise UserError(f"{option} must be at least 1, found {value}")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(f"--json: {json_file} cannot be a file: it is a folder, or lies in none; name another")
