"""The promise in all its settings: every drafter × target × cache × batch gives the tokens of plain decoding.

Greedy, and sampled by `coupled`, against plain decoding with a contiguous cache of the same kind. The full product is
slow; a part of it that holds every pair of settings always runs.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calib import corpora
from calib.prompts import prompts
from compress.model.source import default_pair
from runtime import Model, Speculator, load
from runtime.bench.prompts import read_prompts
from runtime.engine.metrics import total
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Result
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.nested import NestedDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from tests.conftest import write_medusa

NESTED = "nested"  # drafts with int8 targets only
DRAFTERS = ("model", "tree", "lookup", "suffix", "lookup+model", "re-encoded", "medusa", NESTED)
INT8 = "int8-dynamic"
TARGETS = ("original", INT8, "int4-rtn", "nf4", "ternary")
# Enough for every prompt below by itself, and too few for sixteen at once.
PAGES = 30
CACHES = tuple(CacheOptions(kind, pages) for pages in (None, PAGES) for kind in ("float32", "int8", "int4"))
BATCHES = (1, 4, 16)
QUICK_PROMPTS = {1: 2, 4: 5, 16: 16}
# A tree's budget counts nodes, of which one path is accepted.
GAMMA = {"tree": 12, "medusa": 8}
NEW_TOKENS, LONGEST_PROMPT, PROMPTS = 48, 256, 16
FILES = {"humaneval": "humaneval/HumanEval.jsonl.gz", "spec-bench": "spec-bench/question.jsonl"}


@dataclass(frozen=True)
class Case:
    """One combination of settings."""

    drafter: str
    target: str
    cache: CacheOptions
    batch: int

    def __str__(self) -> str:
        return f"{self.drafter}-{self.target}-{'paged-' * (self.cache.pages is not None)}{self.cache.kind}-{self.batch}"

    @property
    def possible(self) -> bool:
        return self.drafter != NESTED or self.target == INT8


PRODUCT = [
    case for case in itertools.starmap(Case, itertools.product(DRAFTERS, TARGETS, CACHES, BATCHES)) if case.possible
]
# Each drafter with each cache; the steps let the other settings meet, too, as a test below checks.
QUICK = [
    Case(drafter, INT8 if drafter == NESTED else TARGETS[(i + j) % 5], cache, BATCHES[(i + 2 * j) % 3])
    for i, drafter in enumerate(DRAFTERS)
    for j, cache in enumerate(CACHES)
]
COUPLED_CACHES = (CacheOptions(), CacheOptions("int8", PAGES))
COUPLED = [
    case
    for case in itertools.starmap(Case, itertools.product(DRAFTERS, (INT8, "nf4"), COUPLED_CACHES, (1, 16)))
    if case.possible
]


@dataclass(frozen=True)
class Bench:
    """What all cases share: models, prompts by their source, and the texts without speculation."""

    model: Callable[..., Model]
    draft: Model
    texts: Callable[[str], list[str]]
    plain: Callable[[str, str, str], list[Result]]
    heads: Callable[[Model], Path]

    def drafter(self, name: str, target: Model) -> Any:
        """The drafter of this name for a target; nested needs the one with planes."""
        vocab_size = target.decoder.vocab_size
        match name:
            case "model":
                return self.draft
            case "tree":
                return TreeDrafter(self.draft, vocab_size=vocab_size)
            case "lookup":
                return LookupDrafter()
            case "suffix":
                return SuffixDrafter()
            case "lookup+model":
                return ChainedDrafter([LookupDrafter(), ModelDrafter(self.draft, vocab_size=vocab_size)])
            case "re-encoded":
                return SimpleNamespace(decoder=self.draft.decoder, tokenizer=shorter_tokenizer(self.draft))
            case "medusa":
                return MedusaDrafter(load_heads(self.heads(target), target))
            case _:
                return NestedDrafter(target)

    def speculator(self, case: Case) -> Speculator:
        target = self.model(case.target, planes=case.drafter == NESTED)
        drafter = self.drafter(case.drafter, target)
        made = Speculator(target, drafter, GAMMA.get(case.drafter, 5), cache=case.cache, max_batch=case.batch)
        assert ("re-encoded" in made.drafter.name) == (case.drafter == "re-encoded")
        return made


def shorter_tokenizer(model: Model) -> Any:
    """The model's tokenizer without its last thousand merges, and so without their tokens: other tokens for a text."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = model.tokenizer.backend_tokenizer
    description = json.loads(tokenizer.to_str())
    bpe = description["model"]
    gone = {a + b for a, b in bpe["merges"][-1000:]}
    bpe["merges"] = bpe["merges"][:-1000]
    bpe["vocab"] = {token: id_ for token, id_ in bpe["vocab"].items() if token not in gone}
    made = type(tokenizer).from_str(json.dumps(description))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=model.tokenizer.eos_token)


def prompt_file(source: str) -> Path:
    """The source's file in `shared/data` beside the project; skips the test where that is not there."""
    for folder in Path(__file__).resolve().parents:
        if (found := folder / "shared" / "data" / FILES[source]).is_file():
            return found
    pytest.skip(f"no shared/data/{FILES[source]} beside the project")


@pytest.fixture(scope="module")
def bench(pair_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    models: dict[tuple[str, bool], Model] = {}
    sources: dict[str, list[str]] = {}
    texts: dict[tuple[str, str, str], list[Result]] = {}

    def model(name: str, planes: bool = False) -> Model:
        if (name, planes) not in models:
            models[name, planes] = load(pair_target(name), planes=planes)
        assert models[name, planes].decoder.exact
        return models[name, planes]

    def prompts_of(source: str) -> list[str]:
        if source not in sources:
            sources[source] = chosen(source, model("original").tokenizer)
        return sources[source]

    def plain(source: str, target: str, kind: Any) -> list[Result]:
        key = source, target, kind
        if key not in texts:
            # In one batch, which is quicker; the cases of batch 1 show that this changes nothing.
            texts[key] = Speculator(model(target), cache=CacheOptions(kind)).generate(
                prompts_of(source), NEW_TOKENS, stop=()
            )
        return texts[key]

    def heads(target: Model) -> Path:
        # All of them repeat the target's own head: a guess at the next token but one that is right now and then.
        return write_medusa(target.path, tmp_path_factory.mktemp("heads") / "medusa")

    return Bench(model, load(default_pair()[1]), prompts_of, plain, heads)


def chosen(source: str, tokenizer: Any) -> list[str]:
    """Prompts of a source, from all over it, that are not too long for the test's time."""
    if source == "python":
        found = prompts(corpora.load(), 4 * PROMPTS, seed=0)
    else:
        found = [prompt.text for prompt in read_prompts(prompt_file(source))]
    short = [text for text in found if len(tokenizer(text)["input_ids"]) <= LONGEST_PROMPT]
    return short[:: len(short) // PROMPTS][:PROMPTS]


def check(bench: Bench, case: Case, source: str, count: int = PROMPTS) -> None:
    expected = bench.plain(source, case.target, case.cache.kind)[:count]
    results = bench.speculator(case).generate(bench.texts(source)[:count], NEW_TOKENS, stop=())
    mismatches = [i for i, (a, b) in enumerate(zip(results, expected, strict=True)) if a.tokens != b.tokens]
    assert not mismatches, f"texts {mismatches} of {len(expected)} differ"
    measured = total([result.metrics for result in results])
    # Nobody guesses the nonsense that a ternary target writes, but its repetitions.
    assert measured.drafted > 0 and (measured.accepted > 0 or case.target == "ternary")
    if case.cache.pages is not None and case.batch == 16 and source == "python":
        # The pages do not last, so some texts are put back and go on later.
        assert measured.preemptions > 0


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_greedy(bench: Bench, case: Case) -> None:
    check(bench, case, "python", QUICK_PROMPTS[case.batch])


def test_the_quick_cases_hold_every_pair_of_settings() -> None:
    def pairs(cases: Sequence[Case]) -> set[tuple[Any, ...]]:
        settings = [vars(case).items() for case in cases]
        return {pair for items in settings for pair in itertools.combinations(items, 2)}

    assert pairs(QUICK) == pairs(PRODUCT)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("source", FILES)
def test_greedy_on_other_prompts(bench: Bench, source: str, drafter: str) -> None:
    check(bench, Case(drafter, INT8, CacheOptions("float32", PAGES), 4), source, QUICK_PROMPTS[4])


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
@pytest.mark.parametrize("source", ["python", *FILES])
def test_greedy_in_full(bench: Bench, source: str, case: Case) -> None:
    check(bench, case, source)


def test_another_kind_of_cache_would_be_noticed(bench: Bench) -> None:
    """The positive of the tests above: rounded keys and values change some text of every target that makes sense."""
    for target in ("original", INT8):
        texts = [[result.tokens for result in bench.plain("python", target, kind)] for kind in ("float32", "int4")]
        assert texts[0] != texts[1]


def check_coupled(bench: Bench, case: Case, seeds: int) -> None:
    settings = [Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(seeds)]
    texts = [bench.texts("python")[seed % PROMPTS] for seed in range(seeds)]
    plain = Speculator(bench.model(case.target), cache=CacheOptions(case.cache.kind))
    expected = [result.tokens for result in plain.generate(texts, 24, settings, stop=())]
    speculator = bench.speculator(case)
    drafted = speculator.generate(texts, 24, settings, stop=())
    mismatches = [seed for seed, result in enumerate(drafted) if result.tokens != expected[seed]]
    assert not mismatches, f"seeds {mismatches} of {seeds} give other texts"
    assert total([result.metrics for result in drafted]).accepted > 0
    other = [replace(one, seed=one.seed + seeds) for one in settings]
    assert speculator.generate(texts[:1], 24, other[:1], stop=())[0].tokens != expected[0]


# Every fifth case: each drafter, target, cache and batch is among them.
@pytest.mark.parametrize("case", COUPLED[::5], ids=str)
def test_a_seed_gives_the_text_without_speculation(bench: Bench, case: Case) -> None:
    check_coupled(bench, case, 16 if case.batch == 16 else 6)


@pytest.mark.slow
@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_a_hundred_seeds_give_the_text_without_speculation(bench: Bench, case: Case) -> None:
    check_coupled(bench, case, 100)
