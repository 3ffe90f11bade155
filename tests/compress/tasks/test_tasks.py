"""lm-eval itself runs tasks on our runtime, and gives what its own class for transformers gives."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import UserError
from compress.model.source import default_pair
from compress.tasks.evaluate import evaluate, require_tasks
from runtime import load

lm_eval = pytest.importorskip("lm_eval")

LINES = ("return value", "raise ValueError(name)", "for item in items:", "self.count += 1", "yield from found", "pass")
CHOICE = """
task: next_line
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{lines}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
"""
ROLLING = """
task: whole_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{whole}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: bits_per_byte}}
"""
WRITING = """
task: writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{whole}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - {{metric: exact_match}}
"""
NAMES = ("next_line", "whole_texts", "writing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on one JSONL file."""
    made = tmp_path_factory.mktemp("tasks")
    chooser = np.random.default_rng(4)
    rows = []
    for number in range(12):
        words = " ".join(LINES[i] for i in chooser.integers(len(LINES), size=int(chooser.integers(2, 30))))
        lines = [f"    {LINES[i]}\n" for i in chooser.choice(len(LINES), 4, replace=False)]
        text = f"def part_{number}(value, items):\n    # {words}\n"
        rows.append({"text": text, "lines": lines, "answer": number % 4, "whole": text + lines[0]})
    file = made / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    for name, task in zip(NAMES, (CHOICE, ROLLING, WRITING), strict=True):
        (made / f"{name}.yaml").write_text(task.format(file=file))
    return made


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def samples(model: Any, folder: Path, names: tuple[str, ...] = NAMES) -> dict[str, list[Any]]:
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[*names],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        name: [one["resps"] for one in sorted(found["samples"][name], key=lambda one: one["doc_id"])] for name in names
    }


def compare(path: Path, folder: Path, batch: int) -> None:
    from lm_eval.models.huggingface import HFLM

    from compress.tasks.model import SpecpressLM

    ours = samples(SpecpressLM(str(path), batch_size=batch), folder)
    theirs = samples(HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=3), folder)
    for name in NAMES[:2]:
        flat = [np.array([float(x) for x in _numbers(found[name])]) for found in (ours, theirs)]
        assert len(flat[0]) >= 12 and np.abs(flat[0]).max() > 1
        assert flat[0] == pytest.approx(flat[1], rel=1e-4, abs=1e-4)
    assert ours["writing"] == theirs["writing"] and any(str(one) for one in ours["writing"])


def _numbers(found: Any) -> list[float]:
    if isinstance(found, (list, tuple)):
        return [x for one in found for x in _numbers(one)]
    return [float(found)]


def test_figures_are_those_of_lm_evals_class_for_transformers(tiny: Callable[..., Path], folder: Path) -> None:
    # 96 positions: some texts are longer, and are cut or rolled over.
    compare(tiny("llama", max_position_embeddings=96), folder, batch=5)


@pytest.mark.slow
def test_figures_of_the_pairs_target_are_those_of_transformers(folder: Path) -> None:
    compare(default_pair()[0], folder, batch=4)


def test_two_models_are_compared_sample_by_sample(tiny: Callable[..., Path], folder: Path) -> None:
    models = load(tiny("llama")), load(tiny("llama", seed=3))
    found = {(one.task, one.metric): one for one in evaluate(models, ("float32", "int8"), ["next_line"], folder)}
    right = found["next_line", "acc_norm"]
    assert right.samples == 12 and right.lost is not None and right.won is not None
    assert right.compressed - right.original == pytest.approx((right.won - right.lost) / 12)
    assert right.lost + right.won > 0
    same = evaluate((models[0], models[0]), ("float32", "float32"), ["next_line", "whole_texts"], folder)
    assert all(one.original == one.compressed for one in same)
    assert next(one for one in same if one.metric == "bits_per_byte").lost is None


def test_mistakes_are_one_sentence(tiny: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    from compress.tasks.model import SpecpressLM

    require_tasks(["next_line"], folder)
    with pytest.raises(UserError, match="expected a folder with task YAML files"):
        require_tasks(["next_line"], tmp_path / "nowhere")
    with pytest.raises(UserError, match="expected a number of requests, found 'auto'"):
        SpecpressLM(str(tiny("llama")), batch_size="auto")
    (tmp_path / "gone.yaml").write_text(CHOICE.format(file=tmp_path / "gone.jsonl").replace("next_line", "gone"))
    model = load(tiny("llama"))
    with pytest.raises(UserError, match="--tasks gone: "):
        evaluate((model, model), ("float32", "float32"), ["gone"], tmp_path)


@pytest.mark.slow  # lm-eval reads the index of all its tasks
def test_an_unknown_task_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"expected tasks that lm-eval or .* knows, found no_such_task_at_all"):
        require_tasks(["next_line", "no_such_task_at_all"], folder)
    require_tasks(["next_line", "hellaswag"], folder)


@pytest.mark.slow  # lm-eval's command imports all that it has
def test_lm_evals_own_command(tiny: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    words = ["run", "--model", "specpress", "--tasks", "next_line", "--include_path", str(folder), "--model_args"]
    command = [sys.executable, "-m", "compress.tasks", *words]
    done = subprocess.run([*command, f"pretrained={tiny('llama')}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "next_line" in done.stdout and "acc_norm" in done.stdout, done.stderr
    wrong = subprocess.run([*command, f"pretrained={tmp_path}/no"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "error: " in wrong.stderr
