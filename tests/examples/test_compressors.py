"""The pure parts of examples/compare/compressors.py, and what it says to a user's mistakes. No peer is needed."""

import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner


def scores(compare: Any, excess: list[float], divergence: list[float] | None = None) -> Any:
    values = np.array(excess)
    return compare("excess").Scores(values + 2.0, values, values if divergence is None else np.array(divergence))


def test_the_original_has_no_excess_over_itself(compare: Any, tiny: Callable[..., Path]) -> None:
    excess, model = compare("excess"), tiny("llama")
    windows = torch.randint(0, 320, (3, 24), generator=torch.Generator().manual_seed(0))
    checkpoints = [excess.load(model), excess.load(tiny("llama", seed=1))]
    found, other = excess.score(excess.load(model), checkpoints, windows)
    assert found.excess.tolist() == [0.0] * 3 and found.divergence.tolist() == [0.0] * 3
    assert (other.divergence > 0.01).all()
    assert other.loss - other.excess == pytest.approx(found.loss)


def test_a_model_that_knows_nothing_has_the_vocabulary_s_entropy(compare: Any, tiny: Callable[..., Path]) -> None:
    excess, windows = compare("excess"), torch.tensor([[5, 6, 7, 8]])
    original, blank = excess.load(tiny("llama")), excess.load(tiny("llama"))
    with torch.no_grad():
        blank.get_input_embeddings().weight.zero_()
    (found,) = excess.score(original, [blank], windows)
    assert found.loss[0] == pytest.approx(math.log(320), abs=1e-9)
    with torch.inference_mode():
        log_p = torch.log_softmax(original(input_ids=windows[:, :-1]).logits[0].double(), -1)
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    assert found.divergence[0] == pytest.approx(math.log(320) - float(entropy), abs=1e-6)
    assert found.excess[0] == pytest.approx(math.log(320) + float(log_p[range(3), windows[0, 1:]].mean()), abs=1e-6)


def test_who_compresses_the_head_too_is_not_compared(compare: Any, tiny: Callable[..., Path]) -> None:
    excess, model = compare("excess"), tiny("llama")
    original, blocks, head = excess.load(model), excess.load(model), excess.load(model)
    with torch.no_grad():
        blocks.get_submodule("model.layers.0.mlp.down_proj").weight.mul_(0.5)
        head.get_output_embeddings().weight[0, 0] += 1
    excess.check_outside(model, original, blocks)
    with pytest.raises(ValueError, match="compressed outside the blocks too"):
        excess.check_outside(model, original, head)


def test_tensors_that_do_not_fit_are_named(compare: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny("llama") / "model.safetensors")
    tensors["model.layers.0.k_scale"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*left over.*k_scale"):
        compare("excess").load(tmp_path)


def test_inputs_are_rounded_before_the_layer(compare: Any, tiny: Callable[..., Path], monkeypatch: Any) -> None:
    dense, excess, model = compare("dense"), compare("excess"), tiny("llama")
    name, grid = "model.layers.1.mlp.down_proj", dense.StaticInput(0.25, 0.0, 8)
    monkeypatch.setattr(dense, "read", lambda path, read=dense.read: replace(read(path), inputs={name: grid}))
    network, seen = excess.load(model), list[torch.Tensor]()
    layer = network.get_submodule(name)
    layer.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output)))
    with torch.no_grad():
        network(input_ids=torch.arange(12)[None])
    x, y = seen
    assert torch.equal(x, (x / 0.25).round() * 0.25) and x.abs().max() > 0
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight))


def test_verdicts(compare: Any) -> None:
    generator = np.random.default_rng(0)
    theirs = 0.01 + 0.002 * generator.standard_normal(64)
    noise = 0.001 * generator.standard_normal(64)
    noise -= noise.mean()
    verdict = lambda factor: compare("excess").compare(  # noqa: E731
        scores(compare, list(factor * theirs + noise)), scores(compare, list(theirs)), target=1.03
    )
    assert verdict(1.0).verdict == "met"
    assert verdict(1.035).verdict == "in the noise"
    assert verdict(1.3).verdict == "missed"
    assert verdict(1.3).excess_ratio.value == pytest.approx(1.3)
    assert verdict(1.3).excess_ratio.low < 1.3 < verdict(1.3).excess_ratio.high


def test_resamples_take_the_same_windows_of_both(compare: Any) -> None:
    theirs = np.random.default_rng(0).uniform(0.001, 0.1, 32)
    found = compare("excess").compare(scores(compare, list(2 * theirs)), scores(compare, list(theirs)), target=1.03)
    # Drawn apart, the ratio of means would spread by a third; together, every resample has exactly 2.
    assert (found.excess_ratio.low, found.excess_ratio.high) == pytest.approx((2.0, 2.0))
    assert (found.beyond.value, found.divergence_ratio.value) == pytest.approx((0.97 * theirs.mean(), 2.0))


def test_settings_are_told_apart_and_chosen_by_pattern(compare: Any) -> None:
    settings = compare("settings")
    names = [setting.name for setting in settings.SETTINGS]
    assert len(set(names)) == len(names) == len({replace(s, name="") for s in settings.SETTINGS})
    assert {(s.bits, s.group_size, s.order) for s in settings.SETTINGS if s.method == "gptq"} >= {
        (bits, group, order) for bits in (4, 3, 2) for group in (128, 32) for order in ("none", "inputs")
    }
    assert [s.name for s in settings.chosen(["wanda-*", "awq-4-g32"])] == ["awq-4-g32", "wanda-50", "wanda-2of4"]
    assert [s.name for s in settings.chosen(None, settings.TIMED)] == list(settings.TIMED)
    assert {setting.peer for setting in settings.SETTINGS} == set(settings.PEERS)


def test_a_recipe_says_what_the_setting_says(compare: Any) -> None:
    settings = compare("settings")
    recipes = {setting.name: settings.our_recipe(setting) for setting in settings.SETTINGS}
    assert recipes["gptq-3-g32-order"]["stages"] == [
        {
            "quantize": {
                "scheme": "int3",
                "group_size": 32,
                "method": "gptq",
                "symmetric": True,
                "act_order": True,
                "damping": 0.01,
                "search": False,
            }
        }
    ]
    assert recipes["wanda-2of4"]["stages"] == [{"prune": {"method": "wanda", "pattern": "2:4"}}]
    assert [list(stage) for stage in recipes["smoothquant-w8a8"]["stages"]] == [["smooth"], ["quantize"]]
    assert recipes["gptq-4-g128-grouporder"] is None
    assert [name for _, name in compare("jobs").wanted(settings.chosen(["gptq-4-g128-grouporder"]), False)] == [
        "GPTQModel"
    ]


def done(compare: Any, wall: float, seconds: float) -> Any:
    return compare("jobs").Done(wall, seconds, 2 * wall, 10_000_000, {"version": "1"})


def test_times_are_medians_and_ratios_are_taken_round_by_round(compare: Any) -> None:
    tables = compare("compressor_tables")
    taken = {
        ("a", "specpress"): [done(compare, wall, wall / 2) for wall in (1.0, 2.0, 9.0)],
        ("a", "GPTQModel"): [done(compare, wall, wall) for wall in (2.0, 8.0, 9.0)],
        ("b", "GPTQModel"): [done(compare, 1.0, 1.0)],
    }
    ours, _, alone = tables.time_rows(taken)
    assert (ours.wall_seconds, ours.seconds, ours.cpu_seconds, ours.rounds) == (2.0, 1.0, 4.0, 3)
    assert (alone.setting, alone.compressor) == ("b", "GPTQModel")
    (ratio,) = tables.time_ratios(taken)
    assert (ratio.wall, ratio.wall_min, ratio.wall_max, ratio.seconds) == (0.5, 0.25, 1.0, 0.25)


def test_the_tables_print_what_was_found_and_what_was_not(compare: Any) -> None:
    from rich.console import Console

    settings, tables = compare("settings").chosen(["wanda-*"]), compare("compressor_tables")
    found = {
        ("wanda-50", "specpress"): scores(compare, [0.02, 0.04]),
        ("wanda-50", "llm-compressor"): scores(compare, [0.01, 0.02]),
        ("wanda-2of4", "llm-compressor"): scores(compare, [0.3, 0.3]),
    }
    rows = tables.quality_rows(settings, found)
    assert [row.verdict for row in rows] == ["missed", None]
    console = Console(width=160, file=io.StringIO())
    tables.print_quality(console, rows)
    tables.print_times(console, tables.time_rows({("a", "GPTQModel"): [done(compare, 3.0, 1.0)]}), [])
    printed = console.file.getvalue()
    for shown in ("wanda-50", "30.00 ±", "15.00 ±", "2.000 [2.00, 2.00]", "missed", "300.00 ± 0.00", "GPTQModel"):
        assert shown in printed
    content = tables.report(rows, {("a", "GPTQModel"): [done(compare, 3.0, 1.0)]}, settings)
    assert json.loads(json.dumps(content))["quality"][0]["comparison"]["excess_ratio"]["value"] == pytest.approx(2.0)


FAKE = """
import json
from makers.compression import serve

def compress(job, stopwatch):
    with stopwatch:
        if job.setting["bits"] == 13:
            raise RuntimeError("thirteen bits")
    job.out.mkdir()
    (job.out / "seen.json").write_text(json.dumps([job.tokens(), job.setting, job.threads]))
    return {"version": "fake"}

serve(compress)
"""


def test_a_compression_is_a_process_and_is_done_once(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.errors import UserError

    settings, jobs, saved = compare("settings"), compare("jobs"), compare("saved")
    (tmp_path / "fake_maker.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(settings.PEERS, "fake", ("fake_maker", {}))
    (tmp_path / "windows.json").write_text("[[1, 2], [3, 4]]")
    python = Path(sys.executable)
    bench = jobs.Bench(tmp_path, tmp_path / "windows.json", {}, python, python, 1, tmp_path / "logs")
    setting, said = settings.Setting("s", "fake", "gptq", bits=4), list[str]()
    first = saved.make(bench, tmp_path / "out", [(setting, "fake")], said.append)
    again = saved.make(bench, tmp_path / "out", [(setting, "fake")], said.append)
    assert first == again and said == ["s: fake"]
    (took,) = first["s", "fake"]
    assert 0 < took.seconds < took.wall_seconds and took.cpu_seconds > 0 and took.peak_bytes > 1e6
    assert took.facts == {"version": "fake", "threads": "1"}
    windows, told, threads = json.loads((saved.place(tmp_path / "out", setting, "fake") / "seen.json").read_text())
    assert (windows, told["bits"], threads) == ([[1, 2], [3, 4]], 4, 1)
    # Another setting of that name is another checkpoint, and one that fails leaves none behind.
    with pytest.raises(UserError, match="fake, s: ended with exit code 1: RuntimeError: thirteen bits"):
        saved.make(bench, tmp_path / "out", [(replace(setting, bits=13), "fake")], said.append)
    assert not saved.place(tmp_path / "out", setting, "fake").exists()


def test_a_shortened_checkpoint_is_a_whole_one(compare: Any, tmp_path: Path) -> None:
    from runtime.checkpoints.open import open_checkpoint

    tokenizer = Path(__file__).parents[2] / "examples" / "pair" / "target"
    with compare("timed").random_checkpoint("pair", 2, tokenizer, tmp_path) as model:
        checkpoint = open_checkpoint(model)
        assert checkpoint.config["num_hidden_layers"] == 2
        assert len([name for name in checkpoint.names() if name.endswith("q_proj.weight")]) == 2
        assert len(list(model.glob("*.safetensors"))) == 3
        assert torch.isfinite(checkpoint.tensor("model.layers.1.mlp.down_proj.weight").float()).all()
        with pytest.raises(ValueError, match="expected 1 to 2 blocks, found 3"):
            compare("timed").shorten(model, 3)
    assert not list(tmp_path.iterdir())


def test_windows_are_the_ones_that_the_product_draws(compare: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from calib import corpora
    from calib.windows import make_windows
    from runtime.errors import UserError

    calibration, model = compare("calibration"), tiny("llama")
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(f"{name} line of text\n" * 200)
    text = calibration.Text(str(tmp_path), samples=4, seq_len=32, eval_tokens=96, seed=3)
    drawn = calibration.draw(text, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = make_windows(
        corpora.load(str(tmp_path)),
        tokenizer,
        length=32,
        calibration=4,
        evaluation_tokens=96,
        seed=3,
        separator=tokenizer.eos_token_id,
    )
    assert torch.equal(drawn.calibration, expected.calibration)
    assert torch.equal(drawn.evaluation, expected.evaluation)
    file = calibration.write(drawn.calibration, tmp_path)
    assert json.loads(file.read_text()) == drawn.calibration.tolist()
    assert calibration.write(drawn.evaluation, tmp_path) != file
    with pytest.raises(UserError, match=r"--eval-tokens: .* of 31250 windows"):
        calibration.draw(replace(text, eval_tokens=1_000_000), model)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--setting", "gptq-5-*"], "--setting: expected one of gptq-4-g128, "),
        (["--peer-python", "nowhere/python"], "--peer-python: there is no nowhere/python; `make compressors` builds"),
        (["--json", "nowhere/x.json"], "--json: nowhere/x.json cannot be a file"),
        (["--seq-len", "2048"], "--seq-len: expected at most the model's 1024 positions, found 2048"),
        (["--source", "nowhere.txt"], "nowhere.txt"),
        (["--time", "--shape", "llama"], "--shape: expected one of tinyllama-1.1b"),
        (["--time", "--blocks", "23"], "--blocks: tinyllama-1.1b has 22, found 23"),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    compare: Any, arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments if "--peer-python" in arguments else ["--peer-python", sys.executable, *arguments]
    result = CliRunner().invoke(compare("compressors").app, given)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert not any(tmp_path.iterdir())
