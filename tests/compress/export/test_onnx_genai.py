"""ONNX Runtime GenAI runs the exported folder and writes what we write. Needs onnxruntime-genai, which no extra has."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compress.export import run
from runtime import Speculator, load

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
genai = pytest.importorskip("onnxruntime_genai")

pytestmark = pytest.mark.slow


def generate(folder: Path, prompt: list[int], length: int) -> list[int]:
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=length, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_same_greedy_tokens(kind: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The folder as it is: genai_config.json, float32 graph; against our own decoder."""
    run("onnx", tiny(kind), tmp_path / "out")
    prompt = [5, 17, 200, 9, 33, 100, 7, 8]
    written = Speculator(load(tiny(kind))).generate([prompt], max_new_tokens=40)[0]
    assert generate(tmp_path / "out", prompt, len(prompt) + 40) == prompt + written.tokens


def test_the_tokenizer_is_read(pair_target: Callable[[str], Path], tmp_path: Path) -> None:
    """On the embedded pair's target in 4 bits: text to the same ids, and the same greedy tokens."""
    source = pair_target("int4-rtn")
    run("onnx", source, tmp_path / "out")
    ours = load(tmp_path / "out")
    text = "def main():\n    import"
    ids = ours.tokenizer(text)["input_ids"]
    assert list(genai.Tokenizer(genai.Model(str(tmp_path / "out"))).encode(text)) == ids
    written = Speculator(ours).generate([ids], max_new_tokens=40)[0]
    assert generate(tmp_path / "out", ids, len(ids) + 40) == ids + written.tokens
