"""A model whose logits are a hash of the last tokens, with a real cache: exact by construction, and quick."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.rows import Cache, Out, Rows

VOCABULARY = 320
Context = tuple[int, ...]


@dataclass
class ListCache:
    """The tokens themselves, per request, in slots. `broken` forgets one token too few when it truncates."""

    broken: bool = False
    slots: dict[int, list[int]] = field(default_factory=dict)
    capacity: dict[int, int] = field(default_factory=dict)

    def open(self, capacity: int) -> int:
        handle = next(i for i in range(len(self.slots) + 1) if i not in self.slots)
        self.slots[handle] = []
        self.capacity[handle] = capacity
        return handle

    def close(self, request: int) -> None:
        del self.slots[request], self.capacity[request]

    def length(self, request: int) -> int:
        return len(self.slots[request])

    def truncate(self, request: int, length: int) -> None:
        assert 0 <= length <= self.length(request)
        del self.slots[request][length + self.broken :]

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        slots = self.slots[request]
        self.slots[request] = slots[:length] + [slots[length + step] for step in path]

    def bytes_per_token(self) -> int:
        return 8


@dataclass
class HashDecoder:
    """logits = `law` of the last three tokens. Counts its forwards; `broken` goes to its caches."""

    law: Callable[[Context], np.ndarray]
    max_positions: int = 4096
    broken: bool = False
    vocab_size: int = VOCABULARY
    hidden_size: int = 4
    exact: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    caches: list[ListCache] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def new_cache(self) -> ListCache:
        self.caches.append(ListCache(self.broken))
        return self.caches[-1]

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        assert isinstance(cache, ListCache)
        self.widths.append(len(tokens))
        ids, handles = tokens.tolist(), rows.request.tolist()
        before = {handle: list(cache.slots[handle]) for handle in handles}
        paths: list[list[int]] = []
        for i, (token, handle, position, parent) in enumerate(
            zip(ids, handles, rows.position.tolist(), rows.parent.tolist(), strict=True)
        ):
            assert parent < i and (parent < 0 or handles[parent] == handle)
            path = [*(before[handle] if parent < 0 else paths[parent]), token]
            assert self.broken or position == len(path) - 1 < self.max_positions
            paths.append(path)
            cache.slots[handle].append(token)
            assert self.broken or cache.length(handle) <= cache.capacity[handle]
        at = range(len(ids)) if logits_at is None else logits_at.tolist()
        logits = [self.law(tuple(paths[i][-3:])) for i in at]
        stacked = torch.tensor(np.array(logits), dtype=torch.float32).view(len(logits), self.vocab_size)
        return Out(stacked, torch.tensor([[float(len(paths[i]))] * self.hidden_size for i in at]))


@dataclass
class FakeModel:
    """What `runtime.load` returns, as far as the loop looks at it. No token ends a text unless a test says so."""

    decoder: Any
    tokenizer: Any
    end_tokens: frozenset[int] = frozenset([10**9])
    path: Path = Path("fake")
    draft_path: Path | None = None


def _hashed(seed: int, context: Context) -> np.ndarray:
    key = seed
    for token in context:
        key = (key * 1_000_003 + token + 1) % 2**61
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCABULARY)


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[..., Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny("llama"))


@pytest.fixture
def fake(tokenizer: Any) -> Callable[..., FakeModel]:
    """fake(seed, noise=0.0, …): `noise` mixes in another hash, as a draft is a noisy copy of its target."""

    def make(seed: int = 0, noise: float = 0.0, end_tokens: Sequence[int] = (10**9,), **options: Any) -> FakeModel:
        def law(context: Context) -> np.ndarray:
            return 3 * _hashed(seed, context) + noise * _hashed(seed + 1000, context)

        return FakeModel(HashDecoder(law, **options), tokenizer, frozenset(end_tokens))

    return make


@pytest.fixture
def constant(tokenizer: Any) -> Callable[[np.ndarray], FakeModel]:
    """A model whose next-token distribution is always the given one, over the ids 0, 1, …"""

    def make(distribution: np.ndarray) -> FakeModel:
        logits = np.full(VOCABULARY, -np.inf)
        with np.errstate(divide="ignore"):
            logits[: len(distribution)] = np.log(distribution)
        return FakeModel(HashDecoder(lambda context: logits), tokenizer)

    return make


@pytest.fixture(scope="session")
def chi_squared() -> Callable[[np.ndarray, np.ndarray], float]:
    """(observed counts, expected probabilities) to the p-value; bins that expect fewer than 5 are joined.

    0.0 where something impossible was observed.
    """
    from scipy import stats

    def test(observed: np.ndarray, probabilities: np.ndarray) -> float:
        observed, expected = observed.ravel(), probabilities.ravel() * observed.sum()
        if observed[expected == 0].any():
            return 0.0
        large = expected >= 5
        counts, wanted = observed[large], expected[large]
        if (rest := expected[~large].sum()) > 0:
            counts, wanted = np.append(counts, observed[~large].sum()), np.append(wanted, rest)
        if len(wanted) == 1:
            return 1.0
        return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)

    return test
