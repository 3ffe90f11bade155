"""Whatever the files of a model say, `specpress` runs it or says in a sentence why not; nothing crashes or hangs.

Fifty mutations here, 5,000 of the tokenizer's files and 5,000 of the others with `-m slow`.
"""

import json
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import JUNK, assert_sentence, invoke, mutated_bytes, mutated_json

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    "chat_template.jinja",
)
WEIGHTS = ("config.json", "model.safetensors.index.json", "a.safetensors")
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_PADDING = {"direction": "Left", "pad_type_id": 0, "pad_token": "x"}
_PIECES = {"unk_token": "gone", "continuing_subword_prefix": "##", "max_input_chars_per_word": 0}
_SPECIAL = {"SpecialToken": {"id": "gone", "type_id": 0}}
# Parts of a tokenizer that there are, with sizes and expressions that they should not have.
PARTS: tuple[Any, ...] = (
    *(_PADDING | {"strategy": {"Fixed": n}, "pad_id": n, "pad_to_multiple_of": n} for n in (0, 3, 10**12)),
    *({"max_length": n, "stride": 5, "strategy": "LongestFirst", "direction": "Right"} for n in (0, 3, 10**12)),
    *({"type": kind} for kind in ("NFKC", "Lowercase", "BertNormalizer", "Whitespace", "ByteLevel", "Fuse", "BPE")),
    *({"type": "Replace", "pattern": {"Regex": one}, "content": "x" * 50} for one in ("", "(", ".", "(a+)+$", "^")),
    *(_SPLIT | {"pattern": {"Regex": one}} for one in ("", "(", "(?=", r"(\w+\s*)+$", "[z-a]", "\\")),
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "first", "split": True},
    {"type": "TemplateProcessing", "single": [_SPECIAL], "pair": [], "special_tokens": {}},
    {"type": "RobertaProcessing", "sep": ["x", 10**9], "cls": ["y", 10**9], "trim_offsets": True},
    {"type": "Strip", "content": "x", "start": 10**12, "stop": 1},
    {"type": "WordLevel", "vocab": {"a": 1, "b": 2**31}, "unk_token": "gone"},
    {"type": "WordPiece", "vocab": {"a": 1}, **_PIECES},
    {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 7, "byte_fallback": True},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]], "byte_fallback": True, "dropout": 1.5},
)
TEMPLATES = (
    *("{{ 1 / 0 }}", "{{ messages[99].content }}", "{% for %}", "{{ ''.__class__.__mro__ }}", "{% include 'x' %}"),
    *("{{", "{{ raise_exception('no') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'a' * 10**13 }}"),
    *("\ud800", "{{ range(10**12) | list }}", "", "{{ messages | tojson }}", "{{ undefined.x }}"),
    "{{ messages[0].content }}",
)
# Keys that a tokenizer_config.json or generation_config.json may have besides.
_KEYS = (
    "tokenizer_class model_max_length added_tokens_decoder extra_special_tokens chat_template auto_map add_prefix_space"
    " padding_side truncation_side add_bos_token unk_token additional_special_tokens eos_token_id max_length"
    " temperature do_sample num_beams stop_strings cache_implementation"
)
FEW = ["--draft", "none", "--eval-tokens", "0", "--no-speed", "--threads", "1"]


def sound(tiny: Callable[..., Path], folder: Path) -> Path:
    """A tiny quantised model with every file that a tokenizer may have, its weights behind an index."""
    plain = str(tiny("llama", hidden_size=128))
    found = invoke(["compress", "--recipe", "int4-rtn", "--model", plain, "--out", str(folder / "run"), *FEW])
    assert found.exit_code == 0, found.output
    model = folder / "run" / "model"
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    special = {"eos_token": "<end>", "pad_token": {"content": "<end>"}}
    (model / "special_tokens_map.json").write_text(json.dumps(special))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "max_length": 20}))
    (model / "model.safetensors").rename(model / "a.safetensors")
    with (model / "a.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    index = {"metadata": {}, "weight_map": dict.fromkeys(header.keys() - {"__metadata__"}, "a.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def mutated(chance: random.Random, name: str, data: bytes) -> bytes:
    """The file with something wrong in it."""
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", data[:8])
        header, rest = data[8 : 8 + length], data[8 + length :]
        changed = mutated_json(chance, header)
        said = len(changed) if chance.random() < 0.8 else chance.choice([0, 1, len(changed) + 8, 2**40, 2**63])
        return struct.pack("<Q", said) + changed + rest
    if name.endswith(".jinja"):
        templates = [text.encode(errors="surrogatepass") for text in TEMPLATES]
        return chance.choice([*templates, mutated_bytes(chance, data)])
    if name == "config.json" and chance.random() < 0.8:
        config = json.loads(data)
        changed = mutated_json(chance, json.dumps(config["quantization_config"]).encode())
        return json.dumps(config).encode()[:-1] + b', "quantization_config": ' + changed + b"}"
    if name not in WEIGHTS and name != "tokenizer.json" and chance.random() < 0.4:
        value = chance.choice([*JUNK, *TEMPLATES, {"0": {"content": 5}}, {"x": "<end>"}, ["<end>", 3]])
        return json.dumps(json.loads(data) | {chance.choice(_KEYS.split()): value}).encode()
    return mutated_json(chance, data, (*JUNK, *PARTS) if name == "tokenizer.json" else JUNK)


def attempt(model: Path, folder: Path, chance: random.Random) -> int:
    """The exit code of one of the commands that read such a folder."""
    way, out, few = chance.random(), folder / "out", ["--max-new-tokens", "4", "--threads", "1"]
    typed = None
    if way < 0.8:
        prompt = chance.choice(["def f", "a" * 40 + "b", "é \n中", "1"])
        words = ["generate", "--prompt", prompt, "--target", str(model), *few, *["--stop", "x"] * (way < 0.1)]
    elif way < 0.95:
        words, typed = ["chat", str(model), *few], "hello\nyou\n"
    else:
        text = folder / "text.txt"
        text.write_text("def f(a):\n    return a + 1\n" * 40)
        words = ["compress", "--recipe", "nf4", "--model", str(model), "--calib", str(text), "--out", str(out), *FEW]
        words += ["--samples", "2", "--seq-len", "16", "--eval-tokens", "64"]
    found = invoke(words, typed)
    if found.exit_code:
        assert_sentence(found)
        assert not list(folder.glob("out*"))
    shutil.rmtree(out, ignore_errors=True)
    return found.exit_code


def hold(sound: Path, folder: Path, names: tuple[str, ...], count: int, seed: int = 0) -> Counter[int]:
    """Tries so many mutations of these files; returns how often which exit code came of them."""
    codes: Counter[int] = Counter()
    model = folder / "model"
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(sound, model)
        name = chance.choice(names)
        broken = mutated(chance, name, (sound / name).read_bytes())
        (model / name).write_bytes(broken)
        try:
            codes[attempt(model, folder, chance)] += 1
        except BaseException as error:
            raise AssertionError(f"{name}, mutation {number} of seed {seed}: {error!r}: {broken[-2000:]!r}") from error
    return codes


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound(tiny, tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("names", [TOKENIZER, WEIGHTS])
def test_broken_files_are_refused_in_a_sentence(model: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    codes = hold(model, tmp_path, names, 25)
    assert codes[0] > 0 and codes[2] > 5


@pytest.mark.slow
@pytest.mark.parametrize("names", [TOKENIZER, WEIGHTS])
def test_thousands_of_broken_files(model: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    codes = hold(model, tmp_path, names, 5000, seed=1)
    assert codes[0] > 100 and codes[2] > 1000
