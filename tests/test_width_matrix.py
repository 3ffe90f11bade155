"""Random models on every instruction path: a row's bits are the same alone, in wide forwards, in batches and in trees.

A thousand models are `make test-slow`'s. What a machine without AVX-512 does shows in part on one that has it, with
ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2 and MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime import load, native
from runtime.contract import CacheKind, Out, Rows
from runtime.model.base import BaseDecoder
from tests.random_checkpoints import draw

TORCH = ("reference", "plain-torch")
PATHS = (*TORCH, *(name for name in native.PATHS if native.usable(name)[0]))
PAIR = Path(__file__).parents[1] / "examples" / "pair"
MODELS, CHUNK = 1000, 50
# One of every library's layouts, and families that differ in structure.
QUICK = (8, 18, 25, 36, 46, 55, 73)
# These take a while. The first has heads of 10, whose products torch tiles unfairly (kernels/tiles.py).
QUICK_TORCH = (16, 7)
WIDEST = 20
# Found bits, bits that were expected, and where.
Pair = tuple[Tensor, Tensor, str]


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """`load(threads=…)` sets torch's threads for the whole process: puts them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(out: Out) -> Tensor:
    """Logits and hidden states of each row, as the integers that their bits are."""
    return torch.cat((out.logits, out.hidden), dim=1).view(torch.int32)


class Trial:
    """One decoder with one kind of cache, contiguous or of pages."""

    def __init__(self, decoder: BaseDecoder, kind: CacheKind, pages: int | None):
        self.decoder, self.kind, self.pages = decoder, kind, pages

    def fresh(self, capacity: int) -> int:
        """A request in a new cache."""
        self.cache = self.decoder.new_cache(self.kind, self.pages)
        return self.cache.open(capacity)

    def chain(self, request: int, tokens: Tensor) -> Tensor:
        """Appends tokens in one forward."""
        rows = Rows.chains([(request, self.cache.length(request), len(tokens))])
        return rows_of(self.decoder.forward(tokens, rows, self.cache))

    def alone(self, request: int, tokens: Tensor) -> Tensor:
        """Appends tokens one row at a time."""
        return torch.cat([self.chain(request, token) for token in tokens.split(1)])

    def widths(self, tokens: Tensor, want: Tensor, rng: np.random.Generator) -> Iterator[Pair]:
        for width in (*rng.choice(np.arange(2, WIDEST + 1), 3, replace=False), len(tokens)):
            request = self.fresh(len(tokens))
            got = torch.cat([self.chain(request, part) for part in tokens.split(int(width))])
            yield got, want, f"width {width}"

    def batch(self, tokens: Tensor, want: Tensor, rng: np.random.Generator) -> Iterator[Pair]:
        """The beginnings of one text as requests of their own, in forwards of random shares of each."""
        lengths = sorted(int(n) for n in rng.integers(1, len(tokens) + 1, 4))
        handles = [self.fresh(len(tokens)), *(self.cache.open(len(tokens)) for _ in lengths[1:])]
        done = dict.fromkeys(handles, 0)
        while any(done[h] < n for h, n in zip(handles, lengths, strict=True)):
            spans = []
            for handle, length in zip(handles, lengths, strict=True):
                count = min(int(rng.integers(0, 7)), length - done[handle])
                if count:
                    spans.append((handle, done[handle], count))
                    done[handle] += count
            if spans:
                at = torch.cat([torch.arange(start, start + count) for _, start, count in spans])
                out = self.decoder.forward(tokens[at], Rows.chains(spans), self.cache)
                yield rows_of(out), want[at], f"batch {spans}"

    def tree(self, tokens: Tensor, want: Tensor, rng: np.random.Generator) -> Iterator[Pair]:
        """A random tree after a part of the text, each node against its path one row at a time; then one path kept."""
        before, count = int(rng.integers(1, len(tokens))), int(rng.integers(2, WIDEST + 1))
        request = self.fresh(len(tokens) + 2 * WIDEST)
        yield self.chain(request, tokens[:before]), want[:before], "prompt of a tree"
        parents = [int(rng.integers(-1, i)) for i in range(count)]
        words = torch.from_numpy(rng.integers(1, self.decoder.vocab_size, count))
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        expected = []
        for path in paths:
            fork = self.cache.fork(request)
            expected.append(self.alone(fork, words[path])[-1])
            self.cache.close(fork)
        position = torch.tensor([before + len(path) - 1 for path in paths])
        rows = Rows(torch.full((count,), request), position, torch.tensor(parents))
        got = rows_of(self.decoder.forward(words, rows, self.cache))
        yield got, torch.stack(expected), f"tree {parents} after {before}"
        kept = paths[int(rng.integers(count))]
        self.cache.keep(request, before, kept)
        more, whole = words[:3], torch.cat((tokens[:before], words[kept], words[:3]))
        got = self.chain(request, more)
        yield got, self.alone(self.fresh(len(whole)), whole)[-len(more) :], f"after path {kept} was kept"


def compare(folder: Path, seed: int, kernels: str) -> tuple[int, list[str]]:
    """(rows compared, what differed) of one model on one path."""
    model = draw(seed)
    return compare_model(model.write(folder), model.label, model.config["vocab_size"], seed, kernels)


def compare_model(model: Path, label: str, vocab: int, seed: int, kernels: str) -> tuple[int, list[str]]:
    """`compare` of a model that is written; the seed draws the cache, the text and the widths."""
    rng = np.random.default_rng(seed)
    kinds: list[CacheKind] = ["float32", "float32", "int8", "int4", *(["float16"] if kernels in TORCH else [])]  # type: ignore[list-item]
    kind = kinds[rng.integers(len(kinds))]
    length = int(rng.choice([9, 24, 24, 24, 80]))
    tokens = torch.from_numpy(rng.integers(1, vocab, length))
    rows, different, want = 0, [], None
    # torch's threads wait for each other in every operation, which takes long on a machine with other work.
    more = 1 if kernels in TORCH and seed % 10 else 2
    for threads, pages in ((1, None), (more, 16)):
        decoder = load(model, kernels=kernels, threads=threads).decoder
        assert isinstance(decoder, BaseDecoder) and decoder.exact and decoder.kernels == kernels
        trial = Trial(decoder, kind, pages)
        first = trial.alone(trial.fresh(length), tokens)
        # Here bits may depend on the number of threads: torch's products do.
        want = first if want is None or kernels == "plain-torch" else want
        pairs = [(first, want, "alone")]
        for check in (trial.widths, trial.batch, trial.tree):
            pairs += check(tokens, want, rng)
        rows += sum(len(found) for found, _, _ in pairs)
        where = f"{label}, {kernels}, {kind}, {threads} threads, pages {pages}"
        different += [f"{where}: {what}" for found, right, what in pairs if not torch.equal(found, right)]
    return rows, different


@pytest.mark.parametrize(
    "kernels", [pytest.param(path, marks=pytest.mark.slow) if path == "reference" else path for path in PATHS]
)
def test_bits_of_a_few_models(tmp_path: Path, kernels: str) -> None:
    for seed in QUICK_TORCH if kernels in TORCH else QUICK:
        rows, different = compare(tmp_path / str(seed), seed, kernels)
        assert rows > 50 and not different


@pytest.mark.slow
@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("first", range(0, MODELS, CHUNK))
def test_bits_of_a_thousand_models(tmp_path: Path, first: int, kernels: str) -> None:
    found = [compare(tmp_path / str(seed), seed, kernels) for seed in range(first, first + CHUNK)]
    different = [what for _, texts in found for what in texts]
    print(f"{kernels}, models {first} to {first + CHUNK - 1}: {sum(n for n, _ in found)} rows, {len(different)} differ")
    assert not different, "\n".join(different)


def test_another_order_of_sums_would_be_noticed() -> None:
    """The positive: sums in torch's order, another one in long rows, are told apart by what is compared here."""
    tokens = torch.arange(1, 25)
    rows = []
    for kernels in TORCH:
        decoder = load(PAIR / "target", kernels=kernels).decoder
        assert isinstance(decoder, BaseDecoder)
        trial = Trial(decoder, "float32", None)
        rows.append(trial.alone(trial.fresh(24), tokens))
    assert not torch.equal(*rows)
