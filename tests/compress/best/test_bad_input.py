"""What a user can get wrong: each ends in one sentence and exit code 2, with nothing written, and is shown to work
where it is right."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from typer.testing import CliRunner

from compress.best.__main__ import app

Tiny = Callable[..., Path]
SMALL = "--samples 2 --seq-len 64 --eval-tokens 512 --new-tokens 4 --threads 1 --minutes 1".split()  # noqa: SIM905
# Blocks of a model of 260 GB in float32.
DEEP = 40
# Nothing keeps this, which is known after a second of work.
HOPELESS = ["--quality", "0.01%", "--disk", "10kB"]
HOLD = "import sys; from pathlib import Path; from compress.artifact.workspace import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"


def best(model: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["--model", str(model), "--out", str(out), *SMALL, *options])


def refused(found: Result, said: str) -> None:
    lines = [line for line in found.output.splitlines() if line.startswith("error: ")]
    assert found.exit_code == 2 and len(lines) == 1, found.output
    assert said in lines[0]


def worked(found: Result) -> None:
    refused(found, "no choice of bits is predicted to keep these budgets; each within the others reaches")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quality", "1e-2"], "--quality: expected a growth"),
        (["--quality", "-1%"], "--quality: expected a growth"),
        (["--kl", "nan"], "--kl: expected a number above 0"),
        (["--kl", "0.1", "--latency", "0"], "--latency: expected a number above 0"),
        (["--kl", "0.1", "--ttft", "-5"], "--ttft: expected a number above 0"),
        (["--kl", "0.1", "--disk", "0MB"], "--disk: expected a size"),
        (["--kl", "0.1", "--disk", f"{'9' * 400}GB"], "--disk: expected a size"),
        (["--kl", "0.1", "--memory", "many"], "--memory: expected a size"),
        (["--kl", "0.1", "--memory", "900000GB"], "of this machine, where the plan is measured"),
        (["--kl", "0.1", "--eval-tokens", "0"], "--eval-tokens: expected 1 or more"),
        (["--kl", "0.1", "--ttft", "9", "--prompt-tokens", "256"], "--prompt-tokens: expected fewer than the 256"),
        (["--kl", "0.1", "--model", "nowhere/at/all"], "nowhere"),
    ],
)
def test_what_is_asked_wrong_leaves_nothing(tiny: Tiny, tmp_path: Path, options: list[str], said: str) -> None:
    refused(best(tiny("llama"), tmp_path / "plan", *options), said)
    assert not list(tmp_path.iterdir())


def test_experts_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    refused(best(tiny("mixtral"), tmp_path / "plan", "--kl", "0.1"), "does not take experts apart")
    assert not list(tmp_path.iterdir())


def test_a_draft_has_the_models_vocabulary(tiny: Tiny, tmp_path: Path) -> None:
    draft, out = tmp_path / "draft", tmp_path / "plan"
    shutil.copytree(tiny("llama", seed=1), draft)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == n) for n in (40, 41))
    worked(best(tiny("llama"), out, *HOPELESS, "--draft", str(draft)))
    shutil.rmtree(out)
    vocabulary[first], vocabulary[second] = 41, 40
    (draft / "tokenizer.json").write_text(json.dumps(content))
    refused(best(tiny("llama"), out, *HOPELESS, "--draft", str(draft)), "vocabular")
    assert not out.exists()


def test_two_processes_do_not_share_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    out.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        for more in ([], ["--force"]):
            refused(best(tiny("llama"), out, *HOPELESS, *more), f"in use by another run (process {other.pid})")
        assert [path.name for path in out.iterdir()] == ["lock"]
    finally:
        other.stdin.close()
        other.wait()
    worked(best(tiny("llama"), out, *HOPELESS))


def test_a_model_larger_than_memory_is_refused_before_any_work(tiny: Tiny, tmp_path: Path) -> None:
    model, out, wide = tmp_path / "model", tmp_path / "plan", 1 << 22
    shutil.copytree(tiny("llama"), model)
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": wide, "num_hidden_layers": DEEP}
    (model / "config.json").write_text(json.dumps(config))
    _widen(model / "model.safetensors", wide)
    refused(best(model, out, "--kl", "0.1"), "model: looking at its layers takes about")
    assert not out.exists()


def _widen(file: Path, wide: int) -> None:
    """More blocks like the first, their MLPs so wide, each in a file that takes no room: only headers are written."""
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    file.unlink()
    hidden = json.loads((file.parent / "config.json").read_text())["hidden_size"]
    shards = [{name: about for name, about in header.items() if "layers" not in name and name != "__metadata__"}]
    block = {name: about for name, about in header.items() if ".layers.0." in name}
    shards += [{name.replace(".0.", f".{n}."): dict(about) for name, about in block.items()} for n in range(DEEP)]
    index = {}
    for number, shard in enumerate(shards):
        place, path = 0, file.with_name(f"model-{number}.safetensors")
        for name, about in shard.items():
            if "mlp" in name:
                about["shape"] = [hidden, wide] if "down" in name else [wide, hidden]
            count = torch.Size(about["shape"]).numel() * 4
            about["data_offsets"], place = [place, place + count], place + count
            index[name] = path.name
        text = json.dumps(shard).encode()
        with path.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + place)
    (file.parent / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_what_another_program_has_written_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    for name, content in (("journal.json", "[]"), ("journal.json", "no JSON"), ("plan.json", '{"trip": "north"}')):
        out.mkdir()
        (out / name).write_text(content)
        save_file({"w": torch.zeros(3)}, out / "part-00001.safetensors")
        for more in ([], ["--force"]):
            refused(best(tiny("llama"), out, *HOPELESS, *more), "choose another folder with --out")
        assert sorted(path.name for path in out.iterdir()) == sorted([name, "part-00001.safetensors"])
        shutil.rmtree(out)
    out.write_text("a file")
    refused(best(tiny("llama"), out, *HOPELESS), "expected a folder for the plan, found a file")


def test_a_damaged_journal_is_told_and_replaced_with_force(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    worked(best(tiny("llama"), out, *HOPELESS))
    whole = (out / "journal.json").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b'"threads": 1', b'"threads": 2'), b""):
        assert damaged != whole
        (out / "journal.json").write_bytes(damaged)
        refused(best(tiny("llama"), out, *HOPELESS), "is damaged")
        assert (out / "journal.json").read_bytes() == damaged
    worked(best(tiny("llama"), out, *HOPELESS, "--force"))
