"""Old names of keys are read, with a note, and nothing but the note tells the recipe from one with the new names."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from compress import Recipe
from compress.errors import UserError
from compress.recipe.renamed import RENAMED
from compress.run import app

VALUES: dict[str, Any] = {
    "order": True,
    "few": "rtn",
    "least": 7,
    "student": 0.3,
    "passes": 2,
    "checkpointing": True,
    "rate": 1e-3,
    "floor": 0.2,
    "clip": 0.5,
    "accumulate": 3,
    "kl": 0.5,
    "cross_entropy": 0.2,
    "hidden": 0.3,
}
# A stage of each kind, and what has to stand around it.
STAGES: dict[str, dict[str, Any]] = {
    "quantize": {"scheme": "int4", "method": "gptq"},
    "heal": {},
    "ternary": {},
    "qat": {"scheme": "int4"},
    "draft": {},
    "medusa": {},
}
BEFORE: dict[str, list[dict[str, Any]]] = {"heal": [{"prune": {"method": "depth", "share": 0.5}}]}
KEYS = [(place, old, new) for place, keys in RENAMED.items() for old, new in keys.items()]


def written(folder: Path, place: str, *keys: str) -> Path:
    """A recipe with these keys of a stage, and the value of the first of them that has one."""
    kind, *inner = place.split(".")
    value = next(VALUES[key] for key in keys if key in VALUES)
    mapping: dict[str, Any] = dict.fromkeys(keys, value)
    for name in reversed(inner):
        mapping = {name: mapping}
    path = folder / f"{keys[-1]}.yaml"
    stages = [*BEFORE.get(kind, []), {kind: STAGES[kind] | mapping}]
    path.write_text(yaml.safe_dump({"name": "mine", "stages": stages}))
    return path


@pytest.mark.parametrize(("place", "old", "new"), KEYS, ids=[f"{place}.{old}" for place, old, _ in KEYS])
def test_an_old_key_is_read_as_the_new_one(tmp_path: Path, place: str, old: str, new: str) -> None:
    notes: list[str] = []
    found = Recipe.load(written(tmp_path, place, old), note=notes.append)
    assert len(notes) == 1
    assert f"{place}.{old} is called {new} now" in notes[0] and f"{old}.yaml: stages." in notes[0]
    assert found.to_yaml().count(f" {new.split('.')[-1]}: ") == 1
    (tmp_path / "new.yaml").write_text(found.to_yaml())
    assert Recipe.load(tmp_path / "new.yaml", note=pytest.fail) == found
    with pytest.raises(UserError, match=f"{place}.{old}: expected {new} alone, its new name, found both: remove {old}"):
        Recipe.load(written(tmp_path, place, old, new.split(".")[0]))


def test_the_new_word_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(
        "name: a\nstages:\n  - quantize: {scheme: int4, method: gptq, order: true, experts: {few: rtn, least: 9}}\n"
        "  - draft: {student: 0.2, training: {rate: 0.01, floor: 0.1, clip: 2.0, accumulate: 2}}\n"
    )
    (tmp_path / "new.yaml").write_text(
        "name: a\nstages:\n  - quantize: {scheme: int4, method: gptq, act_order: true,\n"
        "      experts: {expert_fallback: rtn, min_tokens: 9}}\n"
        "  - draft: {on_policy_fraction: 0.2, training: {learning_rate: 0.01, min_lr_ratio: 0.1, max_grad_norm: 2.0,\n"
        "      gradient_accumulation_steps: 2}}\n"
    )
    with pytest.warns(FutureWarning, match=r"stages\.0\.quantize\.order is called act_order now") as caught:
        old = Recipe.load(tmp_path / "old.yaml")
    assert len(caught) == 8
    assert old == Recipe.load(tmp_path / "new.yaml")


def test_losses_count_what_they_did(tmp_path: Path) -> None:
    """Without kl the divergence counted 1; what a loss mapping does not name counts nothing."""
    for old, new in (
        ("{hidden: 0.1}", "{forward_kl: 1.0, hidden_states: 0.1}"),
        ("{cross_entropy: 1.0, kl: 0.0}", "{cross_entropy: 1.0}"),
        ("{temperature: 2.0}", "{forward_kl: 1.0}, temperature: 2.0"),
    ):
        text = "name: a\nstages:\n  - prune: {method: depth, share: 0.5}\n  - heal: "
        (tmp_path / "old.yaml").write_text(text + old)
        (tmp_path / "new.yaml").write_text(text + f"{{loss: {new}}}")
        assert Recipe.load(tmp_path / "old.yaml", note=len) == Recipe.load(tmp_path / "new.yaml", note=pytest.fail)


def test_what_is_extended_may_have_old_names(tmp_path: Path) -> None:
    path = written(tmp_path, "quantize", "order")
    (tmp_path / "child.yaml").write_text(f"extends: {path.name}\nkv: {{scheme: int8}}\n")
    notes: list[str] = []
    quantize = Recipe.load(tmp_path / "child.yaml", note=notes.append).quantize
    assert quantize is not None and quantize.act_order
    assert len(notes) == 1 and "order.yaml" in notes[0]


def test_the_command_shows_the_note(tmp_path: Path) -> None:
    path = written(tmp_path, "quantize", "order")
    shown = CliRunner().invoke(app, ["--recipe", str(path), "--model", str(tmp_path / "none"), "--no-speed"])
    assert shown.exit_code == 2
    assert f"note: {path}: stages.0.quantize.order is called act_order now" in shown.stderr
