"""What `speculate` and `load` measure, loaded: a target, its drafter, and prompts as tokens."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import typer

from runtime.bench.measure import machine
from runtime.bench.oracle import OracleDrafter
from runtime.bench.prompts import read_prompts
from runtime.bench.random_models import SHAPES, write_shape
from runtime.bench.speculate import Item, Job, Way, run_once
from runtime.errors import UserError
from runtime.model.layers import described
from runtime.model.load import Model, load
from runtime.sampling.params import Sampling
from runtime.speculate import MAX_DRAFT_LENGTH, NoDrafter
from runtime.speculative.costs import Prober, StepCosts
from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.by_name import make
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.nested import upper_half
from runtime.speculative.verify import Rule

# Prompts of models without a tokenizer: random tokens.
_RANDOM_PROMPT, _RANDOM_PROMPTS = 64, 8
_COST_SECONDS = 5.0


@contextmanager
def opened_job(
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
    device: str = "cpu",
) -> Iterator[tuple[Job, Model]]:
    """Loads what is to be measured, on a device. Raises UserError for whatever does not fit together."""
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

        def opened(name: str, role: str, is_shape: bool, planes: bool = False) -> Model:
            path = write_shape(name, scheme, Path(folder) / f"{role}-{name}") if is_shape else name
            return load(path, device=device, threads=threads, planes=planes)

        model = opened(shape or str(target), "target", shape is not None, planes="nested" in kinds)
        source = draft if draft is not None or model.draft_path is None else str(model.draft_path)
        if not kinds:
            kinds = ["model" if source is not None else "lookup" if model.medusa_path is None else "medusa"]
        draft_model = None
        if kinds == ["oracle", "nested"]:
            kinds, draft_model = ["oracle"], replace(model, decoder=upper_half(model))
        elif {"model", "tree", "oracle"} & set(kinds):
            if source is None:
                raise UserError(f"--drafter {'+'.join(kinds)} needs a draft; give --draft DIR or a shape's name")
            draft_model = opened(source, "draft", source in SHAPES)
        heads = Path(draft) if draft is not None and "medusa" in kinds and draft_model is None else None
        if draft is not None and heads is None and (draft_model is None or draft_model.decoder is model.decoder):
            raise UserError(f"--draft names a model, but --drafter is {'+'.join(kinds)}; leave out one of the two")
        items = _items(model, prompts, count, new_tokens, seed)
        stop: frozenset[int] = frozenset()
        job = Job(model.decoder, _NOTHING, items, new_tokens, batch, sampling, rule, draft_length, stop)
        made = _drafter(job, model, draft_model, kinds, alpha, corpus, rule, seed, heads)
        yield replace(job, drafter=made), model


_NOTHING: Any = None


def _items(model: Model, prompts: Path | None, count: int | None, new_tokens: int, seed: int) -> tuple[Any, ...]:
    if prompts is None:
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
    job: Job,
    model: Model,
    draft: Model | None,
    kinds: Sequence[str],
    alpha: float,
    corpus: Path | None,
    rule: Rule,
    seed: int,
    heads: Path | None,
) -> Drafter:
    if list(kinds) == ["model"] and draft is not None and not (model.path / "tokenizer.json").exists():
        # Random weights have no tokenizers whose vocabularies could differ.
        return ModelDrafter(draft, rule, model.decoder.vocab_size)
    if "oracle" not in kinds:
        return make(model, kinds, draft, corpus, rule, heads)
    if len(kinds) > 1:
        raise UserError("--drafter oracle goes alone: it knows every token")
    assert draft is not None
    if not job.sampling.greedy:
        raise UserError("--drafter oracle knows the greedy text only; leave out --temperature")
    say("plain texts for the oracle")
    plain = run_once(job, Way(NoDrafter(), 0, job.decoder.new_cache()))
    known = {tuple(item.tokens): text for item, text in zip(job.items, plain.tokens, strict=True)}
    return OracleDrafter(draft, known, alpha, seed, job.decoder.vocab_size)


class Between:
    """Times what wide forwards of the target cost between the passes, for `_COST_SECONDS` in all."""

    def __init__(self, job: Job, model: Model, rounds: int) -> None:
        self._prober: Prober | None = None
        self._gamma = 4 if job.draft_length is None else job.draft_length
        self._model, self._seconds = model, _COST_SECONDS / (2 * rounds)

    def __call__(self, text: Sequence[int]) -> None:
        if self._prober is None:
            self._prober = Prober(self._model, text, self._gamma)
        started = perf_counter()
        self._prober.sample()
        while perf_counter() - started < self._seconds:
            self._prober.sample()

    def costs(self) -> StepCosts | None:
        """Medians; None before the first call."""
        return None if self._prober is None else self._prober.costs()


def facts_of(job: Job, model: Model) -> dict[str, Any]:
    device = model.decoder.device
    return {
        "machine": machine() | ({"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "target": model.path.name,
        "random_weights": not (model.path / "tokenizer.json").exists(),
        "kernels": described(model.decoder),
        "threads": model.decoder.threads,
        "protocol": "plain and speculative passes over all prompts in turns; tokens/s with the prompts' time; medians",
    }


def say(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)
