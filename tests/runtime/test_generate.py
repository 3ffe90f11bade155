"""The command: what it prints where, which drafter it takes, and how it ends."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime import Speculator, load
from runtime.generate import app

Tiny = Callable[..., Path]
PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def run_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder: `model/` and a smaller `draft/`."""
    root = tmp_path_factory.mktemp("run")
    shutil.copytree(tiny("llama"), root / "model")
    shutil.copytree(tiny("llama", num_hidden_layers=1), root / "draft")
    return root


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_quiet_prints_the_text_and_nothing_else(run_folder: Path) -> None:
    expected = Speculator(load(run_folder / "model")).generate([PROMPT], max_new_tokens=20)[0].text
    drafters = ("none", "model", "tree", "lookup", "suffix", "lookup+model", "suffix+model", "lookup,model")
    for drafter in (*drafters, "model,lookup+suffix"):
        result = command(
            "--target",
            run_folder / "model",
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            20,
            "--drafter",
            drafter,
            "--quiet",
        )
        assert result.exit_code == 0
        assert result.stdout == expected
        for word in ("α", "τ", "tokens/s", "exact", drafter):
            assert word in result.stderr


def test_a_misspelt_drafter_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    for said, hint in (("lokup", "did you mean lookup?"), ("lookup+modle", "did you mean model?"), ("lookup,none", "")):
        result = command("--target", tmp_path / "none", "--prompt", PROMPT, "--drafter", said)
        told = " ".join(result.stderr.replace("│", "").split())
        assert result.exit_code == 2 and "expected none, auto, model" in told and hint in told


def test_a_run_folder_brings_its_draft(run_folder: Path) -> None:
    result = command("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout.startswith(PROMPT) and "model (draft)" in result.stdout and result.stderr == ""


def report(run: Path, drafter: Any, speedup: Any = 1.25, schema: int = 2) -> None:
    found = {"schema": schema, "speed": {"drafter": drafter, "speedup": {"over_compressed": speedup}}}
    (run / "report.json").write_text(json.dumps(found))


def test_the_drafter_that_a_run_recorded_is_the_default(run_folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    common = ("--prompt", PROMPT, "--max-new-tokens", 4)

    def drafter(*more: object, target: Path = run) -> str:
        result = command("--target", target, *common, *more)
        assert result.exit_code == 0, result.output
        return next(line for line in result.stdout.splitlines() if line.startswith("drafter"))

    report(run, "suffix")
    said = "suffix (fastest when measured: 1.25× plain decoding)"
    assert said in drafter() and said in drafter(target=run / "model")
    assert "model (draft; fastest" in (report(run, "model"), drafter())[1]
    report(run, "none", 1.0)
    assert "none (no drafter was faster when measured" in drafter()
    # What is named counts, and a draft is named to draft.
    assert "lookup" in drafter("--drafter", "lookup") and "fastest" not in drafter("--drafter", "lookup")
    assert "model (draft)" in drafter("--draft", run / "draft")
    # Reports that do not say who was fastest, of an older version or without speed: as without one.
    report(run, "lookup", schema=1)
    assert "model (draft)" in drafter()
    report(run, None)
    assert "model (draft)" in drafter()
    report(run, "medusa")
    assert "model (draft; medusa, the fastest when measured, lacks" in drafter()
    for speed in ('{"drafter": 3}', '{"drafter": "x", "speedup": 1}', '{"drafter": "lookup", "speedup": {}}', "{"):
        broken = f'{{"schema": 2, "speed": {speed}}}'
        (run / "report.json").write_text(broken)
        refused = command("--target", run, *common)
        assert refused.exit_code == 2 and "/report.json" in refused.stderr and "--drafter" in refused.stderr
        assert refused.stderr.count("error: ") == 1 and drafter("--drafter", "none")


def test_the_first_round_drafts_where_the_report_knows_the_drafter(run_folder: Path, tmp_path: Path) -> None:
    """Without its figures the first rounds try out what it takes to decode without drafts."""
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    costs = [{"width": width, "ms": 1.0, "ratio": 1.0} for width in (1, 2, 3, 5, 9)]
    known = {"accepted_by_position": [0.9, 0.8], "mean_draft_length": 2.0, "draft_cost_ratio": 0.01}

    def lengths(**figures: Any) -> str:
        speed = {"drafter": "model", "speedup": {"over_compressed": 1.5}, **figures}
        (run / "report.json").write_text(json.dumps({"schema": 2, "speed": speed}))
        result = command("--target", run, "--prompt", PROMPT, "--max-new-tokens", 3)
        assert result.exit_code == 0, result.output
        return next(line for line in result.stdout.splitlines() if line.startswith("γ drafted a round"))

    assert "rounds by γ: 0: 2)" in lengths()
    assert "rounds by γ: 0: 2)" in lengths(**known)  # widths are not known
    assert "1: 1" in lengths(**known, width_costs=costs)


def test_a_recorded_nested_drafter_gets_its_planes(tiny_packed: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_packed("int8"), tmp_path / "model")
    report(tmp_path, "nested")
    result = command("--target", tmp_path, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert "nested (the target's upper four bits; fastest when" in result.stdout


def test_without_a_draft_lookup_is_taken_and_said(tiny: Tiny) -> None:
    result = command("--target", tiny("llama"), "--prompt", PROMPT, "--max-new-tokens", 5)
    assert result.exit_code == 0 and "lookup (no draft was given" in result.stdout
    result = command("--target", tiny("llama"), "--prompt", PROMPT, "--max-new-tokens", 5, "--drafter", "lookup")
    assert "lookup" in result.stdout and "no draft was given" not in result.stdout


def test_a_corpus_and_a_lossy_rule(run_folder: Path, tmp_path: Path) -> None:
    common = ("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 30, "--quiet", "--draft-length", 4)
    alone = command(*common, "--drafter", "suffix")
    (tmp_path / "corpus.txt").write_text(PROMPT + alone.stdout, encoding="utf-8")
    result = command(*common, "--drafter", "suffix", "--corpus", tmp_path / "corpus.txt")
    assert result.exit_code == 0 and result.stdout == alone.stdout
    assert accepted(result.stderr) > accepted(alone.stderr)
    lossy = command(*common, "--temperature", 1, "--verify", "typical", "--lossy")
    assert lossy.exit_code == 0 and "lossy" in lossy.stderr


def accepted(summary: str) -> int:
    """Accepted tokens, as the command's table shows them."""
    line = next(line for line in summary.splitlines() if line.startswith("α"))
    return int(line.split("(")[1].split()[0])


def test_a_draft_with_another_tokenizer_is_named(tiny: Tiny, run_folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "other"
    shutil.copytree(tiny("llama", num_hidden_layers=1), draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (draft / name).read_text(encoding="utf-8").replace("<end>", "<fin>")
        (draft / name).write_text(text, encoding="utf-8")
    common = ("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    result = command(*common, "--draft", draft)
    assert result.exit_code == 0 and "model (re-encoded) (other)" in result.stdout
    refused = command(*common, "--draft", draft, "--drafter", "tree")
    assert refused.exit_code == 2 and "vocabulary differs" in refused.stderr
    (draft / "tokenizer.json").unlink()
    refused = command(*common, "--draft", draft)
    assert refused.exit_code == 2 and "no tokenizer could be read" in refused.stderr


def test_nested_drafts_with_the_target_s_own_weights(tiny_packed: Callable[[str], Path]) -> None:
    options = ("--target", tiny_packed("int8"), "--prompt", PROMPT, "--max-new-tokens", 24, "--temperature", 0.8)
    plain, drafted = (command(*options, "--quiet", "--drafter", name) for name in ("none", "nested"))
    assert plain.exit_code == drafted.exit_code == 0 and drafted.stdout == plain.stdout
    assert "nested (the target's upper four bits)" in drafted.stderr and "exact" in drafted.stderr
    rejected = command(*options, "--drafter", "nested", "--verify", "rejection")
    assert rejected.exit_code == 0 and "distribution" in rejected.stdout


def test_a_seed_s_text(run_folder: Path) -> None:
    def text(*more: object) -> str:
        options = ("--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01, "--repetition-penalty", 1.1)
        result = command("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 16, "--quiet", *options, *more)
        assert result.exit_code == 0
        return str(result.stdout)

    assert text("--seed", 1) == text("--seed", 1, "--drafter", "none") == text("--seed", 1, "--draft-length", 9)
    assert text("--seed", 1) != text("--seed", 2)
    drawn = [text("--seed", seed, "--temperature", 2, "--verify", "rejection") for seed in (1, 2, 3, 1)]
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", -1), "temperature must be"),
        (("--draft-length", 99), "draft_length must be from 0 to 64"),
        (("--max-new-tokens", 0), "max_new_tokens must be"),
        (("--prompt", ""), "prompt must hold"),
        (("--prompt", "x" * 256), "256 tokens, but the target has 256 positions"),
        (("--kv", "int2"), "the kind of cache must be one of auto, float32, float16, int8, int4, int3, but is 'int2'"),
        (("--drafter", "model"), "--drafter model needs a draft"),
        (("--drafter", "lookup", "--draft", "anywhere"), "leave out one of the two"),
        (("--drafter", "tree"), "--drafter tree needs a draft"),
        (("--drafter", "suffix", "--corpus", "no-such-file.txt"), "no-such-file.txt is not a text file"),
        (("--drafter", "lookup", "--corpus", "a.txt"), "--corpus is for the drafter suffix"),
        (("--verify", "typical"), "typical changes the distribution"),
        (("--drafter", "nested"), "has no int8 layers; compress it to int8, or choose another drafter than nested"),
        (("--device", "tpu"), "device"),
        (("--stop", ""), "stop must hold texts of at least one character"),
        (("--logit-bias", "320:1"), "logit_bias names token 320, but the target's vocabulary has the ids 0 to 319"),
        (("--logit-bias", "-1:1"), "logit_bias must map token ids"),
        (("--logit-bias", "5:inf"), "logit_bias must map token ids (0 or more) to finite numbers"),
        (("--logit-bias", "five:1"), "--logit-bias must be ID:VALUE"),
        (("--logit-bias", "5:1", "--logit-bias", "5:2"), "--logit-bias names token 5 twice"),
        (("--min-tokens", 4), "min_tokens must be at most max_new_tokens (3), but is 4"),
        (("--min-tokens", -1), "min_tokens must be"),
        (("--presence-penalty", 3), "presence_penalty must be from -2 to 2"),
        (("--frequency-penalty", -3), "frequency_penalty must be from -2 to 2"),
        (("--beams", 0), "beams must be from 1 to 64"),
        (("--beams", 2, "--temperature", 1), "--beams looks for the most probable text"),
        (("--beams", 2, "--min-tokens", 1), "--beams looks for the most probable text"),
        (("--beams", 2, "--stop", "x"), "leave out --stop"),
        (("--beams", 2, "--drafter", "lookup"), "--beams searches without speculation"),
    ],
)
def test_a_user_s_mistake_is_one_sentence(tiny: Tiny, arguments: tuple[object, ...], message: str) -> None:
    result = command("--target", tiny("llama"), "--prompt", PROMPT, "--max-new-tokens", 3, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert command("--target", tiny("llama"), "--prompt", PROMPT, "--max-new-tokens", 3).exit_code == 0


def test_penalties_bias_and_stops_reach_the_loop(run_folder: Path) -> None:
    model = load(run_folder / "model")

    def text(*more: object) -> str:
        result = command("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 20, "--quiet", *more)
        assert result.exit_code == 0
        return str(result.stdout)

    expected = Speculator(model).generate([PROMPT], 20)[0]
    first = expected.tokens[0]
    part = next(expected.text[i : i + 2] for i in range(2, 18) if "�" not in expected.text[i : i + 2])
    cases: list[tuple[tuple[object, ...], dict[str, Any]]] = [
        (("--presence-penalty", 1.5, "--frequency-penalty", 0.5), {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        (("--logit-bias", f"{first}:-50", "--logit-bias", "7:0.5"), {"logit_bias": {first: -50.0, 7: 0.5}}),
        (("--stop", part), {"stop": [part]}),
        (("--stop", "never", "--stop", part), {"stop": ["never", part]}),
    ]
    shown = [(text(*arguments), Speculator(model).generate([PROMPT], 20, **options)[0]) for arguments, options in cases]
    assert all(found == wanted.text != expected.text for found, wanted in shown)
    assert shown[2][0] == expected.text[: expected.text.index(part)] and shown[2][1].finish == "stop"
    assert text("--stop", part, "--min-tokens", 20) == expected.text


def test_beams(run_folder: Path) -> None:
    from runtime.engine.beam import beam_search

    best = beam_search(load(run_folder / "model"), PROMPT, 3, 12)[0]
    arguments = ("--target", run_folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--beams", 3)
    quiet = command(*arguments, "--quiet")
    assert quiet.exit_code == 0 and quiet.stdout == best.text and f"{best.score:.4f}" in quiet.stderr
    assert command(*arguments).stdout.startswith(f"{PROMPT}{best.text}\n\nbeams")


def test_a_target_that_is_not_there(tmp_path: Path) -> None:
    result = command("--target", tmp_path / "nothing", "--prompt", PROMPT)
    assert result.exit_code == 2 and "nothing" in result.stderr and "Traceback" not in result.stderr


def test_ctrl_c(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.speculative.drafters.lookup.LookupDrafter.propose", interrupt)
    result = command("--target", run_folder, "--prompt", PROMPT, "--drafter", "lookup", "--max-new-tokens", 20)
    assert result.exit_code == 130 and "Traceback" not in result.output


def test_help_loads_no_model_library() -> None:
    code = "import sys, runtime.generate; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    done = subprocess.run([sys.executable, "-m", "runtime.generate", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--draft-length" in done.stdout
