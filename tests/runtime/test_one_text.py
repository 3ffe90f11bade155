"""One text on every CPU: the same logits, bit for bit, on all instruction paths and in plain torch, and as stored.

The stored digests are tests/one_text.json, which `python -m tests.one_text avx2` writes. All of it by the reference,
and the longest texts, are `make test-slow`'s.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from runtime import native
from tests.one_text import KINDS, LONG, LONGER, PAIR_SUBJECTS, STORED, Subject, digests, every, subjects
from tests.random_checkpoints import FAMILY

STORE = json.loads(STORED.read_text(encoding="utf-8"))
PATHS = [name for name in native.PATHS if native.usable(name)[0]]
# Runs subjects by name in a process of its own, on kernels of that name: prints what `digests` found.
ALONE = """
import json, sys
from tests.one_text import digests, every
chosen = [subject for subject in every() if subject.name in sys.argv[2:]]
print(json.dumps({subject.name: digests(subject, sys.argv[1]) for subject in chosen}))
"""


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """`load(threads=…)` sets torch's threads for the whole process: puts them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def require_stored(chosen: list[Subject], kernels: str) -> None:
    found = {subject.name: digests(subject, kernels) for subject in chosen}
    assert found == {subject.name: STORE[subject.name] for subject in chosen}


def test_what_is_stored_is_of_all_subjects_and_ten_thousand_rows() -> None:
    assert list(STORE) == [subject.name for subject in every()]
    assert all(list(kinds) == list(KINDS) for kinds in STORE.values())
    assert sum(int(text.split()[0]) for kinds in STORE.values() for text in kinds.values()) >= 10_000


@pytest.mark.skipif(not PATHS, reason=native.usable("portable")[1])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_the_stored_bits(path: str) -> None:
    """The pair, every family, original and in every scheme, with every cache: also beyond a split of attention."""
    require_stored([subject for subject in every() if subject not in LONGER], path)


@pytest.mark.slow
@pytest.mark.skipif(not PATHS, reason=native.usable("portable")[1])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_the_stored_bits_of_long_texts(path: str) -> None:
    require_stored(LONGER, path)


@pytest.mark.parametrize("family", FAMILY)
def test_the_reference_has_the_stored_bits(family: str) -> None:
    """A family's original and two more of its schemes, each family's others than its neighbour's."""
    found = subjects(family)
    first = 1 + 2 * FAMILY.index(family) % (len(found) - 1)
    require_stored([found[0], found[first], found[1 + first % (len(found) - 1)]], "reference")


def test_the_reference_has_the_stored_bits_of_the_pair_and_beyond_a_split() -> None:
    draft = PAIR_SUBJECTS[0]
    assert digests(draft, "reference", ["int8"])["int8"] == STORE[draft.name]["int8"]
    assert digests(LONG[0], "reference", ["float32"])["float32"] == STORE[LONG[0].name]["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("subject", every(), ids=lambda subject: subject.name)
def test_the_reference_has_all_stored_bits(subject: Subject) -> None:
    require_stored([subject], "reference")


def test_torchs_own_instruction_path_moves_no_bit() -> None:
    """What torch computes when a model is loaded, and in the reference, without vector instructions: as with them."""
    names = ["gemma nf4", "phi3 plain"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", ALONE, "reference", *names]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {name: STORE[name] for name in names}


@pytest.mark.skipif(not PATHS, reason=native.usable("portable")[1])
def test_a_bit_of_a_weight_moves_the_digest() -> None:
    """The positive: digests are no constants."""
    one, other = (Subject("", seed) for seed in (0, 64))
    assert digests(one, PATHS[0], ["float32"]) != digests(other, PATHS[0], ["float32"])
