"""The matrix of architectures: what it says of a few is measured here, and the page is the installed transformers'."""

import re
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from runtime.errors import UserError
from runtime.models.__main__ import app
from runtime.models.matrix import is_exact, model_types, row

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def listed() -> dict[str, tuple[str, str]]:
    """What the page says: class and how it runs, by model_type."""
    rows = re.findall(
        r"^\| ([\w-]+) \| (\w+) \| (exact|measured|plain|refused) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {kind: (name, runs) for kind, name, runs in rows}


def test_the_page_is_that_of_the_installed_transformers() -> None:
    """Where this fails: python -m runtime.models --write docs/models.md."""
    found, known = listed(), model_types()
    assert f"transformers {transformers.__version__} " in PAGE.read_text(encoding="utf-8")
    assert {kind: name for kind, (name, _) in found.items()} == known
    assert [kind for kind, (_, runs) in found.items() if runs == "exact"] == [k for k in known if is_exact(k)]


@pytest.mark.parametrize(
    ("kind", "runs", "note"),
    [
        ("mixtral", "exact", ""),
        ("gpt2", "exact", ""),
        ("lfm2", "exact", ""),
        ("lfm2_moe", "exact", ""),
        ("qwen3_next", "exact", ""),
        ("qwen3_5_text", "exact", ""),
        ("mamba2", "exact", ""),
        ("falcon_h1", "exact", ""),
        ("bloom", "measured", ""),
        ("lfm3", "exact", ""),
        ("glm4_moe", "exact", ""),
        ("qwen3_5", "exact", ""),
        ("diffllama", "measured", ""),
        ("openai-gpt", "measured", "reads the whole text again"),
        ("mamba", "plain", "MambaForCausalLM cannot be rolled back"),
        ("xlnet", "plain", "XLNetLMHeadModel lets a token's logits depend on what follows it"),
    ],
)
def test_an_architecture_runs_as_the_page_says(kind: str, runs: str, note: str) -> None:
    found = row(kind)
    assert (found.runs, listed()[kind][1]) == (runs, runs)
    assert note in found.note and bool(note) == bool(found.note)


def test_what_runs_nowhere_is_refused_with_why() -> None:
    found = row("gemma4_assistant")
    assert found.runs == "refused" and "no small model of it can be built here" in found.note


def test_a_name_that_transformers_does_not_know_is_a_mistake() -> None:
    with pytest.raises(UserError, match="lama is no causal language model"):
        row("lama")
    told = CliRunner().invoke(app, ["lama"])
    assert told.exit_code == 2 and "lama is no causal" in told.output


def test_the_command_prints_json_and_a_table() -> None:
    told = CliRunner().invoke(app, ["llama", "--json"])
    assert told.exit_code == 0 and '"runs": "exact"' in told.stdout
    assert "LlamaForCausalLM" in CliRunner().invoke(app, ["llama"]).stdout


@pytest.mark.slow
def test_every_row_of_the_page_is_what_is_measured() -> None:
    assert {kind: (found.name, found.runs) for kind in model_types() for found in [row(kind)]} == listed()
