"""What training will take is forecast stage by stage: a draft's training is not forecast as its target's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UserError
from compress.model.plan import make_plan
from compress.model.source import open_sources
from compress.model.structure import read_structure
from compress.pipeline import compress, forecast
from compress.pipeline.forecast import Forecast
from compress.pipeline.forecast_training import Size, Sizes, with_training
from compress.recipe import Quantize, Recipe
from compress.training.checkpoint import Checkpoints
from compress.training.data import portions

Tiny = Callable[..., Path]
TRAINING = {"tokens": 24 * 8 * 12, "batch": 8, "length": 24, "save_every": 3, "evaluate_every": 3}
INT8 = {"quantize": {"scheme": "int8-dynamic"}}
ALIGN = {"training": TRAINING, "prompt": 8}
HEADS = {"training": TRAINING, "heads": 2, "samples": 600}
ANSWERS = {"windows": 400, "top": 64}
STAGES: dict[str, list[dict[str, Any]]] = {
    "heal": [{"prune": {"method": "depth", "share": 0.3}}, {"heal": {"training": TRAINING}}],
    "ternary": [{"ternary": {"training": TRAINING}}],
    "answers": [{"ternary": {"training": TRAINING, "answers": ANSWERS}}],
    "learn": [{"quantize": {"scheme": "int4", "group_size": 32}}, {"learn": {"training": TRAINING}}],
    "draft": [INT8, {"draft": ALIGN}],
    "medusa-1": [INT8, {"medusa": HEADS}],
    "medusa-2": [INT8, {"medusa": {**HEADS, "kind": "medusa-2"}}],
}
# A model of 7 billion weights and a draft of 160 million; the target is packed in 4 bits.
LARGE = Sizes(
    target=Size(7 * 10**9, 1_000_000),
    draft=Size(16 * 10**7, 60_000),
    around=Size(26 * 10**7, 8192),
    block=Size(21 * 10**7, 31_000),
    blocks=32,
    stored=14 * 10**9,
    packed=4 * 10**9,
    integers=7 * 10**9,
    rows=32_000,
    width=4096,
)
NOTHING = Forecast(memory=0, held=0, disk=0, seconds=0)


def recipe_of(kind: str, **training: Any) -> Recipe:
    stages = [{name: dict(keys) for name, keys in stage.items()} for stage in STAGES[kind]]
    if training:
        stages[-1] = {name: {**keys, "training": training} for name, keys in stages[-1].items()}
    return Recipe.model_validate({"name": "own", "stages": stages})


@pytest.mark.parametrize(("kind", "made"), [*((kind, False) for kind in STAGES), ("draft", True)])
def test_the_folder_grows_no_further_than_was_forecast(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, made: bool
) -> None:
    """Looked at where it is largest: before an old checkpoint is removed, and at every sign of progress."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000)))
    folder, found, needs = tmp_path / "out.partial", [0], []
    sweep, check = Checkpoints._sweep, forecast.check

    def look(*_: Any) -> None:
        found.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))

    def sweep_and_look(*args: Any) -> None:
        look()
        sweep(*args)

    def kept(need: Forecast, *rest: Any) -> bool:
        needs.append(need)
        return check(need, *rest)

    monkeypatch.setattr(Checkpoints, "_sweep", sweep_and_look)
    monkeypatch.setattr(forecast, "check", kept)
    draft = "none" if made or kind != "draft" else str(tiny("llama", seed=3))
    options: dict[str, Any] = {"seq_len": 64, "samples": 4, "eval_tokens": 512, "calib": str(text), "threads": 1}
    model = tiny("llama", tie_word_embeddings=False)
    compress(model, recipe_of(kind), tmp_path / "out", draft, progress=look, report=lambda *_: {}, **options)
    fixed = 300_000  # tokenizers, texts and journals, which a forecast of large things leaves out
    assert needs[0].disk / 4 < max(found) < needs[0].disk + fixed


@pytest.mark.parametrize(("length", "windows"), [(256, 8), (512, 4), (1500, 1), (9000, 1)])
def test_an_evaluation_reads_so_many_tokens_at_once(length: int, windows: int) -> None:
    held_out = torch.arange(11 * length).view(11, length)
    found = portions(held_out)
    assert torch.equal(torch.cat(found), held_out)
    assert [len(one) for one in found[:-1]] == [windows] * (len(found) - 1) and 0 < len(found[-1]) <= windows


def test_each_kind_takes_what_it_trains() -> None:
    def need(kind: str, sizes: Sizes = LARGE, **training: Any) -> Forecast:
        return with_training(NOTHING, recipe_of(kind, **training), sizes)

    base = forecast.resident()
    # Student, gradient, two moments and the teacher, in float32.
    assert need("ternary").memory - base > 5 * 4 * LARGE.target.weights
    # The packed target, and four copies of a small draft.
    draft = need("draft")
    assert LARGE.packed < draft.memory - base < 3 * LARGE.packed
    assert draft.disk < need("ternary").disk / 10
    # A draft that is yet to be made needs the original once.
    assert need("draft", replace(LARGE, draft=None)).memory - base > 4 * LARGE.target.weights
    # Heads need the target and the hidden states; medusa-2 trains the model besides.
    states = (600 + 100) * 24 * 4096 * 2
    assert need("medusa-1").memory - base < 4 * LARGE.packed and need("medusa-1").disk > states
    assert need("medusa-2").memory > need("ternary").memory
    more = {**TRAINING, "length": 48}
    assert need("medusa-1", **more).disk - need("medusa-1").disk > states
    # Kept answers are 8 bytes a token each.
    assert need("answers").disk - need("ternary").disk > 400 * 24 * 64 * 8


def test_windows_that_codes_are_fitted_to_are_held_together() -> None:
    def memory(windows: int) -> int:
        stage = {"ternary": {"training": TRAINING, "fit_windows": windows}}
        return with_training(NOTHING, Recipe.model_validate({"name": "own", "stages": [stage]}), LARGE).memory

    # Few of them take less than training does.
    assert memory(10) == pytest.approx(memory(0), rel=1e-3)
    grown = 10_000 * 24 * 2 * 4 * LARGE.block.inputs
    assert memory(50_000) - memory(40_000) == pytest.approx(grown, rel=1e-2)


def test_tokens_take_time_as_what_they_go_through() -> None:
    def seconds(kind: str, **training: Any) -> float:
        return with_training(NOTHING, recipe_of(kind, **training), LARGE).training

    assert seconds("draft", minutes=3) == 180
    assert seconds("medusa-1", minutes=3, tokens=None) == 180
    few, many = ({**TRAINING, "tokens": count} for count in (10_000, 100_000_000))
    assert seconds("ternary", **many) > 100 * seconds("ternary", **few)
    # Four passes of 7 billion weights against one, with three of a small draft.
    assert seconds("draft", **many) < 0.7 * seconds("ternary", **many)


def test_a_recipe_without_training_is_as_it_was() -> None:
    assert with_training(NOTHING, Recipe.load("int4-rtn"), LARGE) is NOTHING


def test_sizes_are_read_from_the_files(tiny: Tiny) -> None:
    target, draft = open_sources(str(tiny("llama")), str(tiny("llama", seed=3)))
    assert draft is not None
    shapes, recipe = target.shapes(), Recipe.load("int8-dynamic")
    structure = read_structure(target.path)
    plan = make_plan(shapes, structure, recipe.quantize)
    sizes = Sizes.of(target, plan, structure, draft)
    assert sizes.target == sizes.draft == Size.of(shapes)
    assert sizes.packed < sizes.stored == target.checkpoint.bytes_on_disk() - _headers(target.checkpoint.path)
    assert (sizes.rows, sizes.width) == (320, 64)
    # Of two blocks the attention and the MLP; the embedding stays as it is.
    assert sizes.integers == sizes.target.weights - 320 * 64 - 5 * 64
    trellis = Quantize(scheme="trellis-4", method="gptq")
    assert Sizes.of(target, make_plan(shapes, structure, trellis), structure, None).integers == 0
    assert Size.of({"a": (3, 5), "norm": (7,), "experts": (2, 3, 5)}) == Size(15 + 7 + 30, 5 + 10)
    assert sizes.around + sizes.block.times(sizes.blocks) == sizes.target and sizes.blocks == 2
    assert sizes.made(0.4) == sizes.around + sizes.block


def _headers(folder: Path) -> int:
    """Bytes of the safetensors files that are no weights: a length of 8 bytes and the header that it says."""
    files = folder.glob("*.safetensors")
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)


def test_learning_that_does_not_fit_says_what_makes_it_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def need(**keys: Any) -> Forecast:
        stages = [STAGES["learn"][0], {"learn": {"training": TRAINING, **keys}}]
        return with_training(NOTHING, Recipe.model_validate({"name": "own", "stages": stages}), LARGE)

    # The original and what a layer keeps of its own; with places of codes four more, of the weights in float32.
    size, base = 4 * LARGE.target.weights, forecast.resident()
    assert 4 * size < need(rounding=False).memory - base < 5 * size
    assert 8 * size < need().memory - base < 9 * size
    # A trellis has no codes that could move.
    assert with_training(NOTHING, recipe_of("learn"), replace(LARGE, integers=0)).memory == need(rounding=False).memory
    long = {"training": {**TRAINING, "batch": 64, "length": 512}}
    assert need(**long, gradient_checkpointing=True).memory < 0.6 * need(**long).memory
    monkeypatch.setattr(forecast, "available", lambda: 100_000_000_000)
    with pytest.raises(UserError, match=r"of memory for its stage learn and 100\.0 GB are free: .*rounding: false"):
        forecast.check(need(), tmp_path, None)
    assert forecast.check(need(rounding=False), tmp_path, 10**12) is False
    # Where the work on the weights takes more, the sentence is of that.
    more = with_training(replace(NOTHING, memory=10**12), recipe_of("learn"), LARGE)
    with pytest.raises(UserError, match=r"1000\.0 GB of memory and 100\.0 GB are free: .*looks at no text"):
        forecast.check(more, tmp_path, None)
