"""The sweep over our own runtime: every drafter, width, batch, temperature and cache gives plain decoding's tokens.

The order of the settings is a seeded shuffle of their product, so that the first few of them mix everything. Results
are a line of JSON each, beside a first line that says of which sweep; a sweep that was stopped goes on from them.
"""

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from runtime.audit.report import Record
from runtime.contract import CacheKind
from runtime.errors import UserError
from runtime.files import regular
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Speculator
from runtime.speculative.drafters.by_name import make

if TYPE_CHECKING:
    from runtime.model.load import Model

_WIDTHS = (1, 2, 4, 7, None)
_BATCHES = (1, 3, 8)
_SAMPLINGS = ((0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.9))
_KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
# Too few for the largest batch, so that requests give theirs back and are read again.
_PAGES = (None, 12)
_SEEDS = (0, 1, 2)
PROMPTS = max(_BATCHES)
_LENGTHS = (3, 9, 17, 40)


@dataclass(frozen=True)
class Case:
    """One combination of settings. `width`: tokens drafted a round; None: chosen every round."""

    drafter: str
    width: int | None
    batch: int
    temperature: float
    top_k: int
    top_p: float
    cache: CacheKind
    pages: int | None
    seed: int

    @property
    def key(self) -> str:
        """Its name among the results."""
        return json.dumps(asdict(self), sort_keys=True)


class CaseResult(Record):
    """`first`: the first difference in words."""

    key: str
    drafter: str
    tokens: int
    differing: int
    drafted: int
    accepted: int
    first: str | None = None


@dataclass(frozen=True)
class Sweep:
    """What is compared: a model, its draft, prompts as tokens, and the bounds."""

    target: "Model"
    draft: "Model | None"
    prompts: Sequence[Sequence[int]]
    settings: int
    seconds: float
    new_tokens: int
    seed: int
    _plain: dict[Any, list[list[int]]] = field(default_factory=dict)

    def drafters(self) -> list[str]:
        """Who can draft for this target."""
        names = ["lookup", "suffix", *(["model", "tree", "lookup+model"] if self.draft is not None else [])]
        names += ["block"] * (self.target.block_path is not None)
        return names + ["medusa"] * (self.target.medusa_path is not None)

    def cases(self) -> list[Case]:
        """The settings of this sweep, in their order."""
        product = itertools.product(self.drafters(), _WIDTHS, _BATCHES, _SAMPLINGS, _KINDS, _PAGES, _SEEDS)
        found = [
            Case(name, width, batch, *ways, kind, pages, seed)
            for name, width, batch, ways, kind, pages, seed in product
        ]
        random.Random(self.seed).shuffle(found)
        return found[: self.settings]

    def run(self, case: Case) -> CaseResult:
        """Decodes the prompts as the case says, and without drafts one by one."""
        drafter = make(self.target, case.drafter, self.draft)
        made = Speculator(
            self.target, drafter, case.width, cache=CacheOptions(case.cache, case.pages), max_batch=case.batch
        )
        sampling = _sampling(case)
        results = made.generate(self.prompts, self.new_tokens, sampling=sampling, stop=())
        expected = self._expected(case, sampling)
        differing, first = 0, None
        for number, (result, plain) in enumerate(zip(results, expected, strict=True)):
            wrong = [at for at, pair in enumerate(itertools.zip_longest(result.tokens, plain)) if pair[0] != pair[1]]
            differing += len(wrong)
            if wrong and first is None:
                first = f"prompt {number + 1} after {wrong[0]} tokens"
        return CaseResult(
            key=case.key,
            drafter=case.drafter,
            tokens=sum(map(len, expected)),
            differing=differing,
            drafted=sum(sum(result.metrics.drafted_at) for result in results),
            accepted=sum(sum(result.metrics.accepted_at) for result in results),
            first=first,
        )

    def _expected(self, case: Case, sampling: Sampling) -> list[list[int]]:
        """Plain decoding, each text alone, in contiguous memory of the same kind."""
        key = (case.cache, sampling)
        if key not in self._plain:
            plain = Speculator(self.target, None, cache=CacheOptions(case.cache), max_batch=1)
            results = plain.generate(self.prompts, self.new_tokens, sampling=sampling, stop=())
            self._plain[key] = [result.tokens for result in results]
        return self._plain[key]

    def identity(self) -> dict[str, Any]:
        """What results of a file must be of, to go on from them."""
        return {
            "schema": 1,
            "model": self.target.path.name,
            "kernels": self.target.decoder.kernels,
            "prompts": [list(prompt) for prompt in self.prompts],
            "new_tokens": self.new_tokens,
            "seed": self.seed,
        }


def sweep(task: Sweep, file: Path | None, progress: Callable[[int, int], None]) -> list[CaseResult]:
    """The results of the settings that there is time for, old ones of `file` included.

    Raises UserError for a file of another sweep.
    """
    started, cases = monotonic(), task.cases()
    done = {} if file is None else read(file, task.identity())
    found = []
    for number, case in enumerate(cases):
        progress(number, len(cases))
        if case.key in done:
            found.append(done[case.key])
        elif monotonic() - started < task.seconds:
            found.append(task.run(case))
            if file is not None:
                _append(file, found[-1].model_dump_json())
    return found


def read(file: Path, identity: dict[str, Any]) -> dict[str, CaseResult]:
    """The results of a file by case; a line that was cut off by a kill is taken away. The file is begun if it is new.

    Raises UserError for a file of another sweep, or of something else.
    """
    lines = regular(file).read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        with file.open("r+b") as cut:
            cut.truncate(sum(len(line.encode()) for line in lines))
    if not lines:
        _append(file, json.dumps(identity))
        return {}
    try:
        if json.loads(lines[0]) != identity:
            raise UserError(f"--out: {file} holds another sweep (model, kernels, prompts or seed): name another file")
        results = [CaseResult.model_validate_json(line) for line in lines[1:]]
    except ValueError as error:
        raise UserError(f"--out: {file} is no file of results: name another one") from error
    return {result.key: result for result in results}


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def random_prompts(vocab_size: int, ids: Sequence[int] | None, seed: int) -> list[list[int]]:
    """Prompts as tokens of `ids` (None: any); every other one repeats itself, for drafters that look a text up."""
    rng = random.Random(seed)
    pool = ids or range(vocab_size)
    found = []
    for number in range(PROMPTS):
        length = _LENGTHS[number % len(_LENGTHS)]
        text = [rng.choice(pool) for _ in range(length)]
        found.append((text[: max(2, length // 4)] * length)[:length] if number % 2 else text)
    return found


def _sampling(case: Case) -> Sampling:
    return Sampling(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p, seed=case.seed)
