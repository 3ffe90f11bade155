"""Medusa heads: their files, their logits, and drafts that change no text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import Model, Speculator, load
from runtime.checkpoints.drafter_files import weights_digest
from runtime.checkpoints.medusa import DESCRIPTION, WEIGHTS, Description, read_description
from runtime.contract import Rows
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Outcome, Request
from runtime.speculative.drafters.by_name import drafter_by_name, make
from runtime.speculative.drafters.fallback import ChainedDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import Head, Heads, MedusaDrafter, load_heads
from runtime.speculative.verify import require_sound
from tests.conftest import MEDUSA_TREE, write_medusa

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
PROMPTS = ["def f(x):", "import os", "a", "class Tree:\n    def"]


@pytest.fixture(scope="module")
def target(tiny_packed: TinyPacked, kernels: str) -> Model:
    return load(tiny_packed("int8"), kernels=kernels)


@pytest.fixture
def folder(target: Model, tmp_path: Path) -> Path:
    return write_medusa(target.path, tmp_path / "medusa", scale=0.02)


# Files.


def description(**changes: Any) -> Description:
    known: dict[str, Any] = {"heads": 3, "layers": 2, "hidden_size": 8, "vocab_size": 20, "shared": False}
    return Description(**{**known, "choices": MEDUSA_TREE, "target": "ab", **changes})


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(description().to_json())
    assert read_description(tmp_path) == description()
    assert sorted(description().shapes())[:3] == [
        "heads.0.layers.0.bias",
        "heads.0.layers.0.weight",
        "heads.0.layers.1.bias",
    ]
    assert description().shapes()["heads.2.projection.weight"] == (20, 8)
    assert description(shared=True).shapes()["heads.2.mix.weight"] == (8, 8)
    assert len(description().shapes()) == len(description(shared=True).shapes()) == 3 * 5


@pytest.mark.parametrize(
    "choices", [[], [()], [(0, 0)], [(1,)], [(0,), (0,)], [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], [(0,), (0, 1)]]
)
def test_choices_that_are_no_tree(choices: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="choice"):
        description(choices=tuple(choices))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version must be 1, found 2"),
        ({"heads": None}, "the key heads is missing"),
        ({"colour": 1}, "the key colour is unknown"),
        ({"heads": "3"}, "heads must be of type int, found '3'"),
        ({"shared": 1}, "shared must be of type bool"),
        ({"layers": 0}, "must be at least 1"),
        ({"choices": [[0], [2]]}, "comes before its parent or a sibling"),
        ({"choices": [0]}, "list of lists"),
        ({"choices": [["a"]]}, "whole numbers"),
        ({"hidden_size": 32}, "do not fit"),
        ({"layers": 2}, "implies the tensor heads.0.layers.1.weight of shape (64, 64), found none"),
        ({"target": "00"}, "were trained on other weights than those of int8"),
    ],
)
def test_wrong_descriptions_are_refused(target: Model, folder: Path, changes: dict[str, Any], said: str) -> None:
    load_heads(folder, target)
    data = json.loads((folder / DESCRIPTION).read_text()) | changes
    (folder / DESCRIPTION).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    with pytest.raises(UserError) as error:
        load_heads(folder, target)
    assert said in str(error.value) and "medusa" in str(error.value)


def test_missing_and_damaged_files_are_refused(target: Model, folder: Path, tiny: Tiny) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    with pytest.raises(UserError, match=WEIGHTS):
        load_heads(folder, target)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"{WEIGHTS} is missing"):
        load_heads(folder, target)
    with pytest.raises(UserError, match=f"{DESCRIPTION} is missing"):
        load_heads(folder.parent, target)
    with pytest.raises(UserError, match="use another drafter"):
        load_heads(folder, load(tiny("gpt2")))


def test_the_digest_follows_the_weights(target: Model, tmp_path: Path) -> None:
    copied = shutil.copytree(target.path, tmp_path / "copy")
    assert weights_digest(copied) == weights_digest(target.path)
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(copied) != weights_digest(target.path)


# Logits.


def hidden_states(model: Model, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, hidden) and the target's own logits (T, V)."""
    tokens = model.tokenizer(text)["input_ids"]
    cache = model.decoder.new_cache()
    out = model.decoder.forward(torch.tensor(tokens), Rows.chains([(cache.open(99), 0, len(tokens))]), cache)
    return out.hidden.clone(), out.logits.clone()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_logits_are_those_of_the_formula(target: Model, tmp_path: Path, shared: bool, layers: int) -> None:
    found = write_medusa(target.path, tmp_path / "heads", scale=0.2, shared=shared, layers=layers)
    weights = {name: tensor.double() for name, tensor in load_file(found / WEIGHTS).items()}
    hidden, _ = hidden_states(target, PROMPTS[3])
    table = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"].double()
    logits = load_heads(found, target).logits(hidden)
    assert logits.shape == (len(hidden), 3, target.decoder.vocab_size)
    for head in range(3):
        x = hidden.double()
        for layer in range(layers):
            prefix = f"heads.{head}.layers.{layer}"
            x = x + torch.nn.functional.silu(x @ weights[f"{prefix}.weight"].T + weights[f"{prefix}.bias"])
        last = f"heads.{head}.{'mix' if shared else 'projection'}.weight"
        expected = x @ weights[last].T @ table.T if shared else x @ weights[last].T
        # The kernels may hold a float table as bfloat16.
        assert (logits[:, head] - expected).norm() < 1e-2 * expected.norm()


def test_heads_without_blocks_effect_are_the_target_s(target: Model, tmp_path: Path) -> None:
    hidden, own = hidden_states(target, PROMPTS[0])
    logits = load_heads(write_medusa(target.path, tmp_path / "heads"), target).logits(hidden)
    assert all(torch.equal(logits[:, head], own) for head in range(3))


# Drafts.


def fixed(rows: np.ndarray, choices: tuple[tuple[int, ...], ...]) -> Heads:
    """Heads whose logits are always rows (heads, V)."""
    about = Description(len(rows), 1, 4, rows.shape[1], False, choices, "")
    made = [Head((), lambda x, row=row: torch.from_numpy(np.tile(row, (len(x), 1)))) for row in rows]  # type: ignore[misc]
    return Heads(about, same(len(rows)), tuple(made))


def same(heads: int) -> Any:
    """The first blocks of heads of a hidden size of 4."""
    return lambda x: torch.zeros(len(x), 4 * heads)


def request(tokens: list[int], id_: int = 0, **options: Any) -> Request:
    return Request(id_, tokens, len(tokens), Sampling(**options), 50)


def read(drafter: MedusaDrafter, one: Request) -> None:
    """As the loop reports the end of a prompt."""
    drafter.observe([Outcome(one, [], 0, torch.zeros(1, 4))])


def test_the_tree_is_that_of_the_choices() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    order = np.argsort(-rows, axis=1)
    drafter, one = MedusaDrafter(fixed(rows, MEDUSA_TREE)), request([1, 2])
    read(drafter, one)
    for budget in range(1, 12):
        draft = drafter.propose([one], [budget])[0]
        chosen = MEDUSA_TREE[:budget]
        require_sound(draft, budget, 20)
        assert draft.probs is None
        assert draft.tokens == [order[len(path) - 1, path[-1]] for path in chosen]
        assert draft.parents == [chosen.index(path[:-1]) if len(path) > 1 else -1 for path in chosen]


def test_only_a_known_state_of_this_very_text_drafts() -> None:
    rows = np.eye(2, 20, dtype=np.float32)
    drafter = MedusaDrafter(fixed(rows, ((0,), (0, 0))))
    one, other = request([1, 2]), request([3], id_=1)
    assert drafter.propose([one, other], [4, 4])[0].tokens == []
    read(drafter, one)
    found = drafter.propose([one, other], [4, 4])
    assert [draft.tokens for draft in found] == [[0, 1], []]
    assert drafter.propose([one], [0])[0].tokens == []
    one.tokens.append(5)  # a token that no forward has told of
    assert drafter.propose([one], [4])[0].tokens == []
    read(drafter, one)
    assert drafter.propose([one], [4])[0].tokens == [0, 1]
    drafter.close(one)
    assert drafter.propose([one], [4])[0].tokens == []


def test_the_state_is_that_of_the_last_accepted_token_and_a_copy() -> None:
    seen: list[torch.Tensor] = []

    def projection(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return torch.zeros(len(x), 20)

    about = Description(1, 1, 4, 20, False, ((0,),), "")
    drafter = MedusaDrafter(Heads(about, same(1), (Head((), projection),)))
    hidden, one = torch.arange(12.0).view(3, 4), request([1, 2])
    drafter.observe([Outcome(one, [0, 3], 2, hidden)])
    hidden.zero_()
    drafter.propose([one], [1])
    assert seen[0].tolist() == [[8.0, 9.0, 10.0, 11.0]]


def test_sampling_that_leaves_few_tokens_leaves_few_nodes() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 20)).astype(np.float32)
    one = request([1, 2], temperature=1.0, top_k=2)
    for rule in ("coupled", "rejection"):
        drafter = MedusaDrafter(fixed(rows, MEDUSA_TREE), rule)
        read(drafter, one)
        draft = drafter.propose([one], [8])[0]
        require_sound(draft, 8, 20)
        assert len(draft.tokens) == 6 and set(draft.tokens[:2]) == set(np.argsort(-rows[0])[:2].tolist())


def test_logits_that_are_no_numbers_are_refused() -> None:
    drafter, one = MedusaDrafter(fixed(np.full((1, 20), np.nan, np.float32), ((0,),))), request([1])
    read(drafter, one)
    with pytest.raises(UserError, match="draft's logits must be finite"):
        drafter.propose([one], [1])


# Texts.

CACHES = [CacheOptions(kind, pages) for pages in (None, 20) for kind in ("float32", "int8", "int4")]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_greedy_texts_are_those_of_plain_decoding(target: Model, folder: Path, cache: CacheOptions, batch: int) -> None:
    expected = Speculator(target, cache=CacheOptions(cache.kind)).generate(PROMPTS, 40, stop=())
    drafter = MedusaDrafter(load_heads(folder, target))
    found = Speculator(target, drafter, 8, cache=cache, max_batch=batch).generate(PROMPTS, 40, stop=())
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    measured = total([result.metrics for result in found])
    # Heads know the state from the prompt's end on: every round drafts but those that need no draft.
    assert measured.drafted > 6 * (measured.rounds - len(PROMPTS)) and measured.accepted > 0


def test_a_draft_length_that_is_chosen_changes_no_text(target: Model, folder: Path) -> None:
    expected = Speculator(target).generate(PROMPTS, 60, stop=())
    drafter = ChainedDrafter([LookupDrafter(), MedusaDrafter(load_heads(folder, target))])
    found = Speculator(target, drafter).generate(PROMPTS, 60, stop=())
    assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_a_seed_s_text_does_not_depend_on_the_heads(target: Model, folder: Path) -> None:
    sampling = [Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=seed) for seed in range(4)]
    expected = Speculator(target).generate(PROMPTS, 30, sampling, stop=())
    found = Speculator(target, MedusaDrafter(load_heads(folder, target)), 8).generate(PROMPTS, 30, sampling, stop=())
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert total([result.metrics for result in found]).accepted > 0
    other = Speculator(target).generate(PROMPTS, 30, sampling[::-1], stop=())
    assert [result.tokens for result in other] != [result.tokens for result in expected]


# By name.


@pytest.fixture
def run_folder(target: Model, tmp_path: Path) -> Path:
    """A run folder with heads and no draft."""
    shutil.copytree(target.path, tmp_path / "run" / "model")
    write_medusa(tmp_path / "run" / "model", tmp_path / "run" / "medusa")
    return tmp_path / "run"


def test_a_run_folder_s_heads_are_found(run_folder: Path, target: Model, tmp_path: Path) -> None:
    model = load(run_folder)
    assert model.medusa_path == run_folder / "medusa" and target.medusa_path is None
    for chosen in (
        drafter_by_name(model),
        drafter_by_name(model, "medusa"),
        drafter_by_name(target, "medusa", run_folder / "medusa"),
        drafter_by_name(target, "medusa", run_folder),
    ):
        assert isinstance(chosen.drafter, MedusaDrafter) and chosen.note == ""
    assert drafter_by_name(model, "lookup+medusa").drafter.name == "lookup+medusa"  # type: ignore[union-attr]
    assert isinstance(make(model, "medusa"), MedusaDrafter)
    with pytest.raises(UserError, match="needs heads, but int8 comes without"):
        drafter_by_name(target, "medusa")
    with pytest.raises(UserError, match="--draft names a model, but --drafter is lookup"):
        drafter_by_name(model, "lookup", run_folder)
