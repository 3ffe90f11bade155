"""What `speculate` and `load` measure, loaded: a target, its drafter, and prompts as tokens."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import typer

from runtime.bench.measure import machine
from runtime.bench.options import JobOptions, SpeculateOptions, at_least_one, writable
from runtime.bench.oracle import OracleDrafter
from runtime.bench.prompts import read_prompts
from runtime.bench.random_models import is_random, write_shape
from runtime.bench.random_tokenizer import write_tokenizer
from runtime.bench.replay import ReplayedDrafter, parse_rates, random_network
from runtime.bench.shapes import SHAPES
from runtime.bench.speculate import GrammarDrafter, Item, Job, Way, run_once
from runtime.checkpoints.heads.open import kind_of
from runtime.checkpoints.locate import locate
from runtime.engine.requests import MAX_DRAFT_LENGTH
from runtime.errors import UserError
from runtime.files import read_json
from runtime.model.layers import described
from runtime.model.load import Model, load
from runtime.sampling.params import Sampling
from runtime.speculative.costs import Prober, StepCosts
from runtime.speculative.draft import Drafter, NoDrafter, parts
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.by_name import AUTO, HEADS, candidates, make
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.nested import upper_half
from runtime.speculative.verify import Rule

if TYPE_CHECKING:
    from runtime.sampling.grammar import Grammar

# Prompts of models without a tokenizer: random tokens.
_RANDOM_PROMPT, _RANDOM_PROMPTS = 64, 8
_COST_SECONDS = 5.0


@contextmanager
def opened_job(options: JobOptions) -> Iterator[tuple[Job, Model]]:
    """Loads what is to be measured. Raises UserError for whatever does not fit together."""
    at_least_one({"--batch": options.batch, "--new-tokens": options.new_tokens, "--count": options.count})
    writable("--json", options.json_file)
    shape, draft, length = options.shape, options.draft, options.draft_length
    if (options.target is None) == (shape is None):
        raise UserError("name either a --target or a --shape to measure")
    if options.verify not in ("coupled", "rejection"):
        raise UserError(f"--verify must be coupled or rejection, found {options.verify!r}")
    if length is not None and not 0 <= length <= MAX_DRAFT_LENGTH:
        raise UserError(f"--draft-length must be from 0 to {MAX_DRAFT_LENGTH}, found {length}")
    rule: Rule = "coupled" if options.verify == "coupled" else "rejection"
    sampling = Sampling(options.temperature, seed=options.seed)
    name = options.drafter or ""
    with TemporaryDirectory(prefix="specpress-bench-") as folder:

        def opened(name: str, role: str, is_shape: bool, planes: bool = False) -> Model:
            path = write_shape(name, options.scheme, Path(folder) / f"{role}-{name}") if is_shape else name
            return load(path, device=options.device, kernels=options.kernels, threads=options.threads, planes=planes)

        model = opened(shape or str(options.target), "target", shape is not None, planes="nested" in parts(name))
        source = draft if draft is not None or model.draft_path is None else str(model.draft_path)
        if not name:
            published = None if draft is None or draft in SHAPES else kind_of(locate(draft))
            own = {"block": model.block_path, "model": source, "medusa": model.medusa_path}
            name = published or next((kind for kind, there in own.items() if there is not None), "lookup")
        elif name == AUTO:
            name = candidates(model, draft)
        kinds = parts(name)
        draft_model = None
        replayed = kinds == ["oracle", "block"]
        if options.rates is not None and not replayed:
            raise UserError("--rates is for the drafter oracle+block; leave it out, or name that drafter")
        if replayed:
            kinds = ["oracle"]
        elif kinds == ["oracle", "nested"]:
            kinds, draft_model = ["oracle"], replace(model, decoder=upper_half(model))
        elif {"model", "tree", "oracle"} & set(kinds):
            if source is None:
                raise UserError(f"--drafter {name} needs a draft; give --draft DIR or a shape's name")
            draft_model = opened(source, "draft", source in SHAPES)
        trained = not replayed and draft_model is None and not set(HEADS).isdisjoint(kinds)
        heads = Path(draft) if draft is not None and trained else None
        if draft is not None and heads is None and (draft_model is None or draft_model.decoder is model.decoder):
            raise UserError(f"--draft names a model, but --drafter is {name}; leave out one of the two")
        items = _items(model, options)
        plain = Job(model.decoder, NoDrafter(), items, options.new_tokens, options.batch, sampling, rule, length)
        schema = options.schema if isinstance(options, SpeculateOptions) else None
        if kinds == ["grammar"] and schema is None:
            raise UserError("--drafter grammar drafts what a schema forces; give --schema FILE")
        if schema is not None:
            grammar = _grammar(model, schema)
            plain = replace(plain, grammar=grammar, stop=frozenset(grammar.ends))
        if kinds == ["none"]:
            drafter: Drafter = NoDrafter()
        elif kinds == ["grammar"]:
            drafter = GrammarDrafter()
        elif list(kinds) == ["model"] and draft_model is not None and not (model.path / "tokenizer.json").exists():
            # Random weights have no tokenizers whose vocabularies could differ.
            drafter = ModelDrafter(draft_model, rule, model.decoder.vocab_size)
        elif "oracle" not in kinds:
            drafter = make(model, name, draft_model, options.corpus, rule, heads, options.tree)
        elif len(kinds) > 1:
            raise UserError("--drafter oracle goes alone: it knows every token")
        elif not sampling.greedy:
            raise UserError("--drafter oracle knows the greedy text only; leave out --temperature")
        elif replayed:
            rates = (options.alpha,) if options.rates is None else parse_rates(options.rates)
            block = BlockDrafter(random_network(model, seed=options.seed))
            drafter = ReplayedDrafter(block, plain_texts(plain), rates, model.decoder.vocab_size, seed=options.seed)
        else:
            assert draft_model is not None
            drafter = oracle_for(plain, draft_model, options.alpha, options.seed)
        yield replace(plain, drafter=drafter), model


def random_items(vocab_size: int, count: int, seed: int) -> tuple[Item, ...]:
    """Prompts for models without a tokenizer: random tokens."""
    draws = np.random.default_rng(seed).integers(0, vocab_size, (count, _RANDOM_PROMPT))
    return tuple(Item(row, "random tokens") for row in draws.tolist())


def oracle_for(job: Job, draft: Model, alpha: float, seed: int = 0) -> OracleDrafter:
    """An oracle that knows what plain greedy decoding makes of the job's prompts."""
    return OracleDrafter(draft, plain_texts(job), alpha, seed, job.decoder.vocab_size)


def plain_texts(job: Job) -> dict[tuple[int, ...], list[int]]:
    """What plain greedy decoding makes of each of the job's prompts."""
    say("plain texts for the oracle")
    plain = run_once(job, Way(NoDrafter(), 0, job.decoder.new_cache()))
    return {tuple(item.tokens): text for item, text in zip(job.items, plain.tokens, strict=True)}


def _items(model: Model, options: JobOptions) -> tuple[Item, ...]:
    decoder, count = model.decoder, options.count
    if options.prompts is None:
        return random_items(decoder.vocab_size, count or _RANDOM_PROMPTS, options.seed)
    found = read_prompts(options.prompts)
    if count is not None and count < len(found):
        found = [found[i * len(found) // count] for i in range(count)]
    items = [Item(model.tokenizer(one.text)["input_ids"], one.group) for one in found]
    fitting = [item for item in items if len(item.tokens) + options.new_tokens <= decoder.max_positions]
    if len(fitting) < len(items):
        typer.echo(
            f"{len(items) - len(fitting)} of {len(items)} prompts are left out: with {options.new_tokens} new tokens"
            f" they are longer than the target's {decoder.max_positions} positions",
            err=True,
        )
    if not fitting:
        raise UserError("--prompts: no prompt is short enough for the target; give shorter ones or lower --new-tokens")
    return tuple(fitting)


def _grammar(model: Model, schema: Path) -> "Grammar":
    """The grammar of a schema's JSON. Raises UserError for a file that is none, and what a grammar cannot hold."""
    from runtime.sampling.grammar import GrammarCompiler
    from runtime.sampling.stopping import resolve
    from runtime.sampling.structure import Structure

    size = model.decoder.vocab_size
    if is_random(model.config) and not (model.path / "tokenizer.json").exists():
        write_tokenizer(model.path, size)
    compiler = GrammarCompiler(model.tokenizer, size, resolve(None, model, size)[0])
    return compiler.compile(Structure.json_schema(read_json(schema)))


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
    """What the JSON file says of a job besides its figures."""
    device = model.decoder.device
    return {
        "machine": machine() | ({"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "target": model.path.name,
        "random_weights": is_random(model.config),
        "kernels": described(model.decoder),
        "threads": model.decoder.threads,
        "protocol": "plain and speculative passes over all prompts in turns; tokens/s with the prompts' time; medians",
    }


def say(text: str) -> None:
    """Progress, for who sits before a terminal."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)
