"""What a recipe may say, and the one sentence for everything else."""

from pathlib import Path

import pytest
import yaml

from compress import Recipe
from compress.errors import UserError
from compress.recipe import built_in

MINIMAL = "stages:\n  - quantize: {scheme: nf4}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        Recipe.load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_built_in_recipes_say_when_to_choose_them() -> None:
    recipes = built_in()
    assert {recipe.name for recipe in recipes} >= {"nf4", "int8-dynamic", "int4-rtn"}
    for recipe in recipes:
        assert 20 < len(recipe.about) <= 120
        assert Recipe.load(recipe.name) == recipe


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    recipe = Recipe.load("int4-rtn")
    assert Recipe.load(write(tmp_path, "copy.yaml", recipe.to_yaml())) == recipe


def test_name_defaults_to_the_file(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path, "mine.yaml", MINIMAL))
    assert recipe.name == "mine"
    assert recipe.quantize.targets == (".*",)
    assert recipe.quantize.head == "keep"


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'int8-dynamic'"):
        Recipe.load("int8dynamic")
    with pytest.raises(UserError, match=r"missing\.yaml: expected a YAML file"):
        Recipe.load("missing.yaml")


def test_bad_yaml_names_file_and_line(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "bad.yaml", "name: x\nstages:\n  - quantize: {scheme: nf4\nabout: y\n"))
    assert "bad.yaml, line 4" in message
    assert "line 2: not valid YAML (key 'name' stands there twice)" in refusal(
        write(tmp_path, "twice.yaml", "name: a\nname: b\n" + MINIMAL)
    )
    assert "expected a mapping" in refusal(write(tmp_path, "list.yaml", "- a\n"))
    assert "found nothing" in refusal(write(tmp_path, "empty.yaml", ""))


def test_yaml_builds_plain_data_only(tmp_path: Path) -> None:
    refusal(write(tmp_path, "object.yaml", "name: !!python/object/apply:os.getcwd []\n" + MINIMAL))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sheme: nf4\n" + MINIMAL, "sheme: unknown key"),
        ("stags: []\n" + MINIMAL, "did you mean stages"),
        (
            "stages:\n  - quantize: {scheme: int4, group: 64}\n",
            "stages.0.quantize.group: unknown key, expected one of scheme, group_size",
        ),
        ("stages:\n  - quantize: {scheme: nf5}\n", "expected int8-dynamic, int4 or nf4, found 'nf5': did you mean nf4"),
        (
            "stages:\n  - quantize: {scheme: int4, group_size: 100}\n",
            "expected one of 128, 64, 32 with scheme int4, found 100",
        ),
        ("stages:\n  - quantize: {scheme: nf4, group_size: 128}\n", "quantize.group_size: expected one of 64"),
        ("stages:\n  - quantize: {scheme: int8-dynamic, group_size: 64}\n", "expected no group_size"),
        (
            "stages:\n  - quantize: {scheme: int4, group_size: '64'}\n",
            "quantize.group_size: expected a whole number, found '64'",
        ),
        ("stages:\n  - quantize: {scheme: nf4, targets: ['(']}\n", "quantize.targets: expected regular expressions"),
        ("stages:\n  - quantize: {scheme: nf4, targets: [7]}\n", "quantize.targets.0: expected a string, found 7"),
        ("stages:\n  - quantize: {scheme: int4, head: int8}\n", "quantize.head: expected keep with scheme int4"),
        ("stages: []\n", "expected exactly one quantize stage so far, found 0"),
        ("stages:\n  - quantize: {scheme: nf4}\n  - quantize: {scheme: nf4}\n", "so far, found 2"),
        ("stages: nf4\n", "stages"),
        ("stages: [nf4]\n", "stages.0: expected a mapping, found 'nf4'"),
        ("about: nothing\n", "stages: expected this key"),
        ("name: ../up\n" + MINIMAL, "name: expected up to 64 letters"),
        ("calibration: {samples: 0}\n" + MINIMAL, "calibration.samples: expected greater than or equal to 1, found 0"),
        ("calibration: {windows: 3}\n" + MINIMAL, "expected one of source, samples, seq_len"),
        # Reserved for later: refused, never accepted and ignored.
        ("kv: int8\n" + MINIMAL, "kv: quantised KV caches are not built yet"),
        ("draft: {layers: 2}\n" + MINIMAL, "draft: drafts are not made by recipes yet"),
        ("export: [onnx]\n" + MINIMAL, "export: exports besides the Hugging Face directory are not built yet"),
        ("stages:\n  - prune: {sparsity: 0.5}\n", "stages.0.prune: this stage is not built yet"),
        ("stages:\n  - quantize: {scheme: int4, method: gptq}\n", "gptq is not built yet, expected rtn"),
        ("stages:\n  - quantize: {scheme: ternary}\n", "ternary is not built yet"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(write(tmp_path, "r.yaml", text))
    assert expected in message
    assert "r.yaml" in message


def test_extends_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    base = {
        "about": "the base",
        "stages": [{"quantize": {"scheme": "int4", "group_size": 64, "ignore": ["down"]}}],
        "calibration": {"samples": 8, "seq_len": 128},
    }
    write(tmp_path, "base.yaml", yaml.safe_dump(base))
    (tmp_path / "deep").mkdir()
    child = write(tmp_path / "deep", "child.yaml", "extends: ../base.yaml\ncalibration: {samples: 4}\n")
    recipe = Recipe.load(child)
    assert (recipe.calibration.samples, recipe.calibration.seq_len) == (4, 128)
    assert recipe.quantize.ignore == ("down",)
    assert (recipe.name, recipe.about) == ("child", "")
    replaced = write(tmp_path / "deep", "other.yaml", "extends: ../base.yaml\nstages: [{quantize: {scheme: int4}}]\n")
    assert Recipe.load(replaced).quantize.ignore == ()
    assert "extends" not in recipe.to_dict()


def test_extends_takes_built_in_names(tmp_path: Path) -> None:
    assert Recipe.load(write(tmp_path, "mine.yaml", "extends: nf4\n")).quantize.scheme == "nf4"
    assert "did you mean" in refusal(write(tmp_path, "typo.yaml", "extends: nf44\n"))


def test_extends_loops_are_shown(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    assert "(a -> b -> a)" in refusal(tmp_path / "a.yaml")
    # Two ways to the same base are no loop.
    write(tmp_path, "base.yaml", MINIMAL)
    write(tmp_path, "mid.yaml", "extends: base.yaml\n")
    assert Recipe.load(write(tmp_path, "top.yaml", "extends: mid.yaml\n")).quantize.scheme == "nf4"


def test_recipes_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe.load("nf4").name = "other"  # type: ignore[misc]
