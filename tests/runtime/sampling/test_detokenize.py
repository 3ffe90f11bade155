"""Tokenizers as AutoTokenizer reads them, without the import of a configuration's class."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.model.source import default_pair
from runtime.sampling.detokenize import read_tokenizer

TEXT = "def f(x):\n    return x + 12 # naïve, 例\n"
_NOTHING_SLOW = """
import sys
from pathlib import Path
from runtime.sampling.detokenize import read_tokenizer
assert len(read_tokenizer(Path(sys.argv[1]))("def f(x):")["input_ids"]) > 2
print("transformers.activations" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The pair's tokenizer and configuration, to be changed."""
    for file in default_pair()[0].iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **values: object) -> None:
    told = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "phi3", "gpt2", "no-such-model"])
@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "GPT2TokenizerFast", None])
def test_is_the_tokenizer_that_transformers_would_take(folder: Path, kind: str, named: str | None) -> None:
    from transformers import AutoTokenizer

    change(folder / "config.json", model_type=kind)
    change(folder / "tokenizer_config.json", tokenizer_class=named)
    found, wanted = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(wanted)
    assert found(TEXT)["input_ids"] == wanted(TEXT)["input_ids"]
    assert found.decode(found(TEXT)["input_ids"]) == wanted.decode(wanted(TEXT)["input_ids"])


@pytest.mark.parametrize(("named", "imported"), [("TokenizersBackend", "False"), (None, "True")])
def test_a_named_class_needs_no_configuration(folder: Path, named: str | None, imported: str) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class=named)
    done = subprocess.run([sys.executable, "-c", _NOTHING_SLOW, str(folder)], capture_output=True, text=True)
    assert done.stdout.strip() == imported, done.stderr
