import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from calib import corpora
from calib.training_text import Measured
from compress.context import RunContext
from compress.recipe import Recipe
from compress.records import LayerRecord, LeftAlone, RunFacts
from compress.report import assemble, baselines, machine, scrub
from compress.report.files import read_report, write_report
from compress.report.schema import Report
from compress.stages import kv_cache
from runtime import load

SOURCE = '''
def clamp_{n}(value, low={n}, high=100):
    """The value, moved into the range from low to high."""
    if low > high:
        raise ValueError("low must not exceed high")
    if value < low:
        return low
    if value > high:
        return high
    return value
'''


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    for n in range(12):
        (folder / f"part_{n}.py").write_text(SOURCE.format(n=n) * 2)
    return folder


@pytest.fixture
def facts(tmp_path: Path, text: Path, tiny: Callable[..., Path]) -> RunFacts:
    original, model = tiny("llama"), tiny("llama", seed=1)
    folder = tmp_path / "run.partial"
    folder.mkdir()
    return RunFacts(
        model_name=str(original),
        draft_name="someone/small-draft",
        original=original,
        folder=folder,
        model=model,
        draft=original,
        layers=(LayerRecord("model.layers.0.mlp.up_proj", "nf4", 64, 12288, 6400, 0.08),),
        left_alone=(LeftAlone("lm_head", "tied to the embedding"),),
        calibration={},
        text=Measured(
            source=str(text),
            corpus=corpora.load(str(text)),
            tokenizer=load(model).tokenizer,
            length=48,
            calibration=2,
            evaluation_tokens=192,
            seed=3,
            separator=None,
        ),
        versions={"python": platform.python_version()},
    )


@pytest.fixture
def context(facts: RunFacts, text: Path) -> RunContext:
    return RunContext.of(
        Recipe.load("nf4"),
        calib=str(text),
        samples=2,
        seq_len=48,
        eval_tokens=192,
        new_tokens=8,
        draft_length=2,
        seed=3,
        command=f"python -m compress.run --recipe nf4 --model {facts.original} --out={facts.folder}",
    )


def test_the_whole_report(
    facts: RunFacts, context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A child that has half a second finishes nothing: what is left of the baselines are their reasons.
    monkeypatch.setattr(baselines, "run", partial(baselines.run, limit=0.5))
    stages: list[str] = []
    found = assemble.make_report(facts, replace(context, progress=lambda stage, done, total: stages.append(stage)))
    assert json.loads((facts.folder / "report.json").read_text()) == found.to_dict()
    assert read_report(facts.folder) == found
    assert sorted(path.name for path in facts.folder.iterdir()) == ["report.html", "report.json", "report.md"]
    assert set(stages) == {"load", "quality", "speed", "baselines", "page"}
    assert found.speed.speculative is not None and found.speed.prompts == assemble.PROMPTS
    assert found.lossless.class_ == "exact" and found.lossless.mismatches == 0
    # Six drafters, each of which decodes all prompts as often.
    assert found.lossless.tokens_compared == 6 * found.speed.repeats * 8 * assemble.PROMPTS
    assert (found.model, found.draft, found.seed) == ("llama", "someone/small-draft", 3)
    assert found.asked.command == "python -m compress.run --recipe nf4 --model llama --out=run.partial"
    assert found.quality.layers[0].error == 0.08
    assert found.size.original_bytes == (facts.original / "model.safetensors").stat().st_size
    assert found.sample.prompt.startswith("def clamp_")


def test_no_path_and_no_names_of_this_machine(facts: RunFacts, context: RunContext, tmp_path: Path) -> None:
    assemble.make_report(facts, replace(context, speed=False))
    for name in ("report.json", "report.md", "report.html"):
        content = (facts.folder / name).read_text()
        for private in (tmp_path, facts.original, facts.original.parent, Path.home(), Path.cwd()):
            assert str(private) not in content
        assert platform.node() not in content


def test_without_speed_everything_else_is_there(facts: RunFacts, context: RunContext) -> None:
    report = assemble.make_report(replace(facts, draft=None, draft_name=None), replace(context, speed=False)).to_dict()
    assert report["speed"]["original"] is None and report["speed"]["baselines"] is None
    assert report["not_measured"]["speed"] == "left out (--no-speed)"
    assert report["quality"]["perplexity"]["compressed"] > 1
    assert report["sample"]["original"] != report["sample"]["compressed"]


def test_a_quantised_cache_is_in_the_report(facts: RunFacts, context: RunContext, tmp_path: Path) -> None:
    plain = assemble.make_report(facts, replace(context, speed=False)).to_dict()
    assert plain["quality"]["kv_perplexity"] is None and "quality.kv_perplexity" in plain["not_measured"]
    model = tmp_path / "model"
    shutil.copytree(facts.model, model)
    windows = torch.randint(1, 300, (2, 48), generator=torch.Generator().manual_seed(0))
    kv_cache.attach(model, kv_cache.calibrate(model, "int4", windows))
    report = assemble.make_report(replace(facts, model=model), replace(context, speed=False)).to_dict()
    quality, before = report["quality"], plain["quality"]
    assert quality["perplexity"] == before["perplexity"] and "quality.kv_perplexity" not in report["not_measured"]
    assert 0 < abs(quality["kv_perplexity"] / quality["perplexity"]["compressed"] - 1) < 0.05
    # 2 layers of 2 heads of 16 dimensions, keys and values: 4 bytes each, or half a byte and a scale.
    assert report["size"]["kv_bytes_per_token"] == {"original": 2 * 2 * 2 * 64, "compressed": 2 * 2 * 2 * 12}
    page = (facts.folder / "report.md").read_text()
    assert "through its quantised cache" in page and f"{quality['kv_perplexity']:.3f}" in page.replace(",", "")


def test_the_same_run_gives_the_same_report(facts: RunFacts, context: RunContext) -> None:
    def run() -> dict[str, Any]:
        report = assemble.make_report(facts, replace(context, speed=False)).to_dict()
        del report["size"]["peak_memory_bytes"]
        return report

    assert run() == run()


def test_an_interrupted_write_leaves_nothing_half_done(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).with_name("report_example.json")
    report = Report.model_validate_json(example.read_text(encoding="utf-8"))
    write_report(report, facts.folder)
    before = {path.name: path.read_bytes() for path in facts.folder.glob("report.*")}
    replace_file = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == "report.html":
            raise OSError("no space left")
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(report.model_copy(update={"seed": 9}), facts.folder)
    assert (facts.folder / "report.html").read_bytes() == before["report.html"]
    assert json.loads((facts.folder / "report.json").read_text(encoding="utf-8"))["seed"] == 9


def test_prompts_are_completed_from_windows(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A text with one paragraph has one prompt; the others are beginnings of its evaluation windows."""
    from calib.windows import make_windows
    from runtime import load

    file = tmp_path / "one.txt"
    file.write_text(" ".join(f"word{n} and another" for n in range(400)))
    corpus, model = corpora.load(str(file)), load(tiny("llama"))
    windows = make_windows(corpus, model.tokenizer, length=64, calibration=1, evaluation_tokens=512, seed=0)
    prompts = assemble.make_prompts(corpus, model, windows, new_tokens=200, seed=0)
    assert len(prompts) == assemble.PROMPTS
    assert all(0 < len(prompt) <= 56 for prompt in prompts)
    assert prompts[1] == windows.evaluation[0, :32].tolist()
    assert prompts == assemble.make_prompts(corpus, model, windows, new_tokens=200, seed=0)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-hf"), ("/data/models/mine", "mine"), ("./mine/", "mine")],
)
def test_model_names(name: str, shown: str) -> None:
    assert scrub.display_name(name) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -m compress.run --recipe nf4 --out runs/x", "python -m compress.run --recipe nf4 --out runs/x"),
        ("run --model /home/me/model --seed 1", "run --model model --seed 1"),
        ("run --model=/home/me/model --out ~/runs/a", "run --model=model --out a"),
        ("run --recipe '/home/me/my recipes/best one.yaml'", "run --recipe 'best one.yaml'"),
    ],
)
def test_commands_lose_their_directories(command: str, shown: str) -> None:
    assert scrub.scrub_command(command) == shown


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_machine_is_described(facts: RunFacts, kernels: str) -> None:
    from runtime import load
    from runtime.kernels import available
    from runtime.model.layers import described

    decoder = load(facts.model, kernels=kernels).decoder
    found = machine.describe(decoder.device, described(decoder))
    assert found.cpu and found.cores >= 1 and found.device == "cpu"
    best = next(kernel.name for kernel in available() if kernel.usable)
    assert found.instruction_path == (best if kernels == "auto" else "reference")
