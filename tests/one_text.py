"""Logits of the embedded pair and of small random models, and their digests: what has to be the same on every machine.

    python -m tests.one_text KERNELS     writes tests/one_text.json, the digests that the tests expect, by these kernels

The models come from numbers that are the same everywhere (random_checkpoints.Stable); nothing here asks torch for
random numbers, for sums, or for functions whose last bits are a library's.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from runtime import load
from runtime.contract import CacheKind, Rows
from runtime.model.base import BaseDecoder
from tests.random_checkpoints import FAMILY, LIBRARIES, Stable, draw

STORED = Path(__file__).with_suffix(".json")
PAIR = Path(__file__).parents[1] / "examples" / "pair"
KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
# Of a text: how many tokens each forward takes; and parents of a tree behind it, rows of three branches.
PIECES = (1, 1, 2, 3, 8, 1, 5, 12)
TREE = (-1, 0, 0, 2, 1, 4, -1)


@dataclass(frozen=True)
class Subject:
    """A model and a text for it, from a number alone.

    name    what the digests are stored under.
    model   "draft" or "target" of the pair, or the number of a random model.
    length  tokens of the text; a random model that sees so far.
    upper   the nested draft on the upper planes of int8 weights.
    """

    name: str
    model: str | int
    length: int = sum(PIECES)
    upper: bool = False

    def write(self, folder: Path) -> Path:
        """The model's directory."""
        if isinstance(self.model, str):
            return PAIR / self.model
        made = draw(self.model, rng=Stable(self.model))
        made.config["max_position_embeddings"] = max(256, self.length + 16)
        return made.write(folder / f"{self.model}")


def subjects(family: str) -> list[Subject]:
    """The original and every library's schemes of a family: a model each, and int8 as the nested draft reads it."""
    first = FAMILY.index(family)
    found = []
    for number, library in enumerate(dict.fromkeys(LIBRARIES)):
        seed = first + 8 * number
        found.append(Subject(f"{family} {library}", seed))
        if library == "llm_int8":
            found.append(Subject(f"{family} nested", seed, upper=True))
    # Both other float types: what a number gets is chance.
    return [*found, *(Subject(f"{family} {dtype}", seed) for dtype, seed in _of_types(first))]


def _of_types(first: int) -> Iterator[tuple[str, int]]:
    wanted = ["float32", "bfloat16"]
    for seed in range(first, 10_000, 64):
        dtype = draw(seed, rng=Stable(seed)).config["dtype"]
        if dtype in wanted:
            wanted.remove(dtype)
            yield dtype, seed
        if not wanted:
            return


PAIR_SUBJECTS = [Subject("pair draft", "draft"), Subject("pair target", "target", 12)]
# Beyond one and two splits of attention: with windows on all or some layers, and without.
LONG = [Subject(f"long {seed}", seed, 600) for seed in (1, 9, 64)]
LONGER = [Subject("pair draft, long", "draft", 800), Subject("longer 0", 0, 1100), Subject("longer 25", 25, 1100)]


def open_decoder(subject: Subject, kernels: str, folder: Path) -> BaseDecoder:
    decoder = load(subject.write(folder), kernels=kernels, threads=1, planes=subject.upper).decoder
    assert isinstance(decoder, BaseDecoder)
    return decoder.upper() if subject.upper else decoder


def logits(decoder: BaseDecoder, subject: Subject, kind: CacheKind) -> Tensor:
    """All rows of a text: in one forward, in pieces, and of a tree behind it, (rows, vocabulary) float32."""
    ids = Stable(subject.length).integers(0, decoder.vocab_size, subject.length + len(TREE))
    tokens, branches = torch.from_numpy(ids[: subject.length]), torch.from_numpy(ids[subject.length :])
    cache = decoder.new_cache(kind)
    out = []
    for pieces in ((subject.length,), _pieces(subject.length)):
        request, at = cache.open(subject.length + len(TREE)), 0
        for count in pieces:
            out.append(decoder.forward(tokens[at : at + count], Rows.chains([(request, at, count)]), cache).logits)
            at += count
    depth: list[int] = []
    for parent in TREE:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    rows = Rows(torch.full((len(TREE),), request), torch.tensor(depth) + subject.length, torch.tensor(TREE))
    out.append(decoder.forward(branches, rows, cache).logits)
    return torch.cat(out)


def _pieces(length: int) -> Sequence[int]:
    """Small ones first, the rest at once."""
    found: list[int] = []
    for piece in PIECES:
        if sum(found) + piece <= length:
            found.append(piece)
    return [*found, *([length - sum(found)] if sum(found) < length else [])]


def digest(rows: Tensor) -> str:
    return hashlib.sha256(rows.numpy().astype("<f4").tobytes()).hexdigest()


def digests(subject: Subject, kernels: str, kinds: Sequence[CacheKind] = KINDS) -> dict[str, str]:
    """By kind of cache: how many rows, and their digest."""
    with TemporaryDirectory() as folder:
        decoder = open_decoder(subject, kernels, Path(folder))
        found = {}
        for kind in kinds:
            rows = logits(decoder, subject, kind)
            assert torch.isfinite(rows).all(), subject
            found[kind] = f"{len(rows)} rows {digest(rows)}"
        return found


def every() -> list[Subject]:
    """What is stored, in its order."""
    return [*(subject for family in FAMILY for subject in subjects(family)), *PAIR_SUBJECTS, *LONG, *LONGER]


def main(kernels: str) -> None:
    found = {subject.name: digests(subject, kernels) for subject in every()}
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    rows = sum(int(text.split()[0]) for kinds in found.values() for text in kinds.values())
    print(f"{STORED.name}: {rows} rows of {len(found)} models by {kernels}")


if __name__ == "__main__":
    main(*sys.argv[1:])
