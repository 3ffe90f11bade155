"""Grammars: their masks are right, whatever path asks for them, and none that somebody sends does harm."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.errors import UserError
from runtime.sampling import grammar as grammar_module
from runtime.sampling.grammar import GrammarCompiler, Matcher
from runtime.sampling.structure import Structure
from tests.conftest import byte_tokenizer

VOCABULARY = 320
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, VOCABULARY, {0})
    yield made
    made.close()


def encoded(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def takes(compiler: GrammarCompiler, structure: Structure, text: str) -> bool:
    """Whether a whole text keeps to a structure."""
    tokens = encoded(text)
    return compiler.compile(structure).matcher().valid([*tokens, 0]) == len(tokens) + 1


LANGUAGE = ["ab", "abc", "aC C", "aC =", "b B", "bé", "b", "cab 1 2"]


@pytest.mark.parametrize(
    "structure",
    [
        Structure.choice(LANGUAGE),
        Structure.regex("|".join(map(re.escape, LANGUAGE)).replace("\\ ", " ")),
        Structure.lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in LANGUAGE)),
    ],
    ids=lambda structure: structure.kind,
)
def test_masks_are_those_of_every_prefix_whatever_path_asks(compiler: GrammarCompiler, structure: Structure) -> None:
    """All token sequences of a small language, walked in a random order from texts of any length."""
    words = [text.encode() for text in LANGUAGE]
    back = {letter: byte for byte, letter in bytes_to_unicode().items()}
    spelled = {i: bytes(back[letter] for letter in token) for token, i in TOKENIZER.get_vocab().items() if i != 0}

    compiled = compiler.compile(structure)

    def text_of(path: list[int]) -> bytes:
        return b"".join(spelled[token] for token in path)

    def by_hand(before: bytes, found: np.ndarray) -> np.ndarray:
        """All tokens on the way to a word; where the words part later only, the tokenizer's own next one."""
        out = np.zeros(VOCABULARY, dtype=bool)
        for token, piece in spelled.items():
            out[token] = any(word.startswith(before + piece) for word in words)
        out[0] = before in words
        if not out[0] and out.sum() > 1 and found.sum() == 1:
            common = os.path.commonprefix([word for word in words if word.startswith(before)])  # noqa: RUF071 (of texts)
            token = encoded(common[len(before) :].decode())[0]
            out[:] = False
            out[token] = True
        return out

    fresh: dict[tuple[int, ...], np.ndarray] = {}
    paths: list[list[int]] = [[]]
    for path in paths:
        matcher = compiled.matcher()
        matcher.advance(path)
        found = fresh[tuple(path)] = matcher.mask([])
        assert np.array_equal(found, by_hand(text_of(path), found))
        paths += [[*path, int(token)] for token in np.flatnonzero(found) if token != 0]
    assert {text_of(path) for path in paths if fresh[tuple(path)][0]} == set(words)
    rng = np.random.default_rng(0)
    for _ in range(60):
        whole = paths[rng.integers(len(paths))]
        cut = int(rng.integers(0, len(whole) + 1))
        matcher = compiled.matcher()
        matcher.advance(whole[:cut])
        below = [path for path in paths if path[:cut] == whole[:cut]]
        for i in rng.permutation(len(below))[:6]:
            path, wanted = below[i][cut:], fresh[tuple(below[i])]
            assert np.array_equal(matcher.mask(path), wanted)
            token = int(rng.integers(VOCABULARY))
            assert matcher.allows(path, token) == wanted[token]
            assert not matcher.allows(path, VOCABULARY + 5)
            assert matcher.valid(path) == len(path)
            forced = matcher.forced(8)
            assert all(fresh[(*whole[:cut], *forced[:n])].sum() == 1 for n in range(len(forced)))
        # On along the path, after masks of others were asked for.
        matcher.advance(whole[cut:])
        assert np.array_equal(matcher.mask([]), fresh[tuple(whole)])


def test_after_the_end_anything_may_follow(compiler: GrammarCompiler) -> None:
    """It is cut off there; verification may ask all the same."""
    matcher = compiler.compile(Structure.choice(["a"])).matcher()
    [letter] = encoded("a")
    assert matcher.mask([letter]).nonzero()[0].tolist() == [0] and matcher.mask([letter, 0]).all()
    assert matcher.allows([letter, 0], 17) and not matcher.allows([letter], 17)
    matcher.advance([letter, 0])
    matcher = compiler.compile(Structure.choice(["a"])).matcher()
    with pytest.raises(UserError, match="grammar"):
        matcher.advance(encoded("b"))


def test_texts_that_share_a_grammar_do_not_disturb_each_other(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Structure.json_object())
    texts = ['{"a":{"b":[1,2]}}', '{"zz":null}', "{}"]
    matchers: list[Matcher] = [compiled.matcher() for _ in texts]
    for place in range(20):
        for matcher, text in zip(matchers, texts, strict=True):
            tokens = encoded(text)
            if place < len(tokens):
                assert matcher.allows([], tokens[place])
                matcher.mask(tokens[place : place + 2])
                matcher.advance([tokens[place]])
    assert all(matcher.mask([])[0] for matcher in matchers)


def test_json_is_compact_or_has_little_whitespace(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    compact, pretty = Structure.json_schema(schema), Structure.json_schema(schema, "pretty")
    assert takes(compiler, compact, '{"a":1}') and not takes(compiler, compact, '{"a": 1}')
    assert takes(compiler, pretty, '{"a":1}') and takes(compiler, pretty, '{\n  "a" : 1\n}')
    assert takes(compiler, pretty, '{"a":' + " " * 8 + "1}") and not takes(compiler, pretty, '{"a":' + " " * 9 + "1}")
    assert takes(compiler, Structure.json_object("pretty"), '{ "a": [1, "é\\n"] }')
    assert not takes(compiler, Structure.json_object(), "[]") and takes(compiler, Structure.json_schema(True), "[]")


def test_literal_texts_are_taken_literally(compiler: GrammarCompiler) -> None:
    odd = ["a.c", "x*", "(b|c)", "[d]", "^$", "\\d", "e\nf", "#&-~", "{2}", "é 🙂", '"']
    structure = Structure.choice(odd)
    assert all(takes(compiler, structure, text) for text in odd)
    assert not any(takes(compiler, structure, text) for text in ("abc", "xx", "b", "d", "", "5", "ef"))


def test_forced_tokens_are_the_tokenizers_own(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"]}
    matcher = compiler.compile(Structure.json_schema(schema)).matcher()
    assert matcher.forced(20) == encoded('{"name":') and matcher.forced(3) == encoded('{"n')
    matcher.advance(encoded('{"name":'))
    assert matcher.forced(20) == []
    matcher.advance(encoded("t"))
    assert matcher.forced(20)[:3] == encoded("rue")


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure.regex("(?=a)b"), "the regex cannot be enforced"),
        (Structure.regex(r"(a)\1"), "the regex cannot be enforced"),
        (Structure.regex("(" * 7000 + "a" + ")" * 7000), "the regex cannot be enforced"),
        (Structure.lark("begin: /a/"), "the lark cannot be enforced: no start"),
        (Structure.lark("start: other"), "unknown name"),
        (Structure.json_schema({"type": "string", "pattern": "(?!a)b"}), "cannot be enforced: pattern"),
        (Structure.json_schema({"type": "object", "minProperties": 1}), ""),
        (Structure.json_schema({"type": "object", "properties": {"a": {}}, "minProperties": 1}), ": minProperties"),
        (Structure.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Structure.json_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum"),
        (Structure.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), r"\$ref"),
        (Structure.json_schema(False), "schema is false"),
        (
            Structure.json_schema({"type": "object", "patternProperties": {"^.*a": True, "^b": True}}),
            "patternProperties",
        ),
    ],
)
def test_what_does_not_compile_is_refused_in_one_sentence(
    compiler: GrammarCompiler, structure: Structure, message: str
) -> None:
    if not message:
        compiler.compile(structure)
        return
    with pytest.raises(UserError, match=message) as error:
        compiler.compile(structure)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


HOSTILE = {
    # Kills its compiler's process by a stack overflow.
    "chain": lambda: Structure.lark(
        "start: r0\n" + "\n".join(f'r{i}:"a"r{i + 1}|"b"' for i in range(2800)) + '\nr2800: "z"'
    ),
    "wide": lambda: Structure.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}
    ),
    "alternatives": lambda: Structure.lark("start: " + "|".join(f'"{i}"' for i in range(7000))),
    "regex": lambda: Structure.regex("((a{1,100}){1,100}){1,100}|(.{1,1000}x){1,1000}"),
    "backtracking": lambda: Structure.regex("(a+)+b|(a|a)*c"),
    "both": lambda: Structure.json_schema({"allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(12)]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_stop_nobody(compiler: GrammarCompiler, name: str) -> None:
    """Refused, or taken with masks that can be had; either way other threads run on, and the next one compiles."""
    ran, stop = threading.Event(), threading.Event()

    def other() -> None:
        while not stop.wait(0.001):
            ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        matcher = compiler.compile(HOSTILE[name]()).matcher()
        assert matcher.mask([]).any()
    except UserError as error:
        assert "cannot be enforced" in str(error)
    finally:
        assert ran.wait(10)
        stop.set()
        thread.join()
    assert takes(compiler, Structure.regex("ab?"), "a")


def test_a_compiler_that_does_not_come_back_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="took more time or memory than it may"):
        made = GrammarCompiler(TOKENIZER, VOCABULARY, {0})
        made.compile(Structure.regex("a"))
        monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.0)
        made.compile(HOSTILE["wide"]())
    monkeypatch.undo()
    assert takes(made, Structure.regex("ab"), "ab")
    process = made._trial._process
    assert process is not None and process.poll() is None
    made.close()
    assert process.poll() is not None


def test_compiled_grammars_are_kept(compiler: GrammarCompiler) -> None:
    first = compiler.compile(Structure.regex("x[0-9]"))
    assert compiler.compile(Structure.regex("x[0-9]")) is first
    for i in range(70):
        compiler.compile(Structure.regex(f"y{i}"))
    assert compiler.compile(Structure.regex("x[0-9]")) is not first


def test_tokenizers_and_models_without_ends(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="needs a token that ends a text"):
        GrammarCompiler(TOKENIZER, VOCABULARY, set())
    with pytest.raises(UserError, match="not one of the tokenizers library"):
        GrammarCompiler(object(), VOCABULARY, {0})
    # A decoder with more rows than the tokenizer has tokens (padded embeddings), or several tokens that end a text.
    padded = GrammarCompiler(TOKENIZER, 384, {0, 5})
    mask = padded.compile(Structure.regex("a?")).matcher().mask([])
    assert len(mask) == 384 and mask[0] and mask[5] and not mask[320:].any()
    padded.close()
    fewer = GrammarCompiler(TOKENIZER, 300, {0})
    assert len(fewer.compile(Structure.regex(" ?")).matcher().mask([])) == 300
    fewer.close()


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = "import sys, runtime; assert not {'llguidance', 'jsonschema'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs llguidance, which is"):
        GrammarCompiler(TOKENIZER, VOCABULARY, {0})


def schemas(seed: int) -> Any:
    """A random schema of the keywords that are held to."""
    rng = np.random.default_rng(seed)

    def pick(*items: Any) -> Any:
        return items[rng.integers(len(items))]

    def make(depth: int) -> Any:
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
        kind = pick(*kinds, *(["object", "array", "anyOf"] * 3 if depth else []))
        if kind == "enum":
            return {"enum": [pick(1, "x", None, True, 2.5, {"k": [1]}, "é") for _ in range(3)]}
        if kind == "const":
            return {"const": pick(0, "text", {"a": None}, [1, 2])}
        if kind == "anyOf":
            return {"anyOf": [make(depth - 1) for _ in range(2)]}
        out: dict[str, Any] = {"type": kind}
        if kind == "string":
            out |= pick({}, {"maxLength": 5}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[a-c]{1,3}-[0-9]$"})
            out |= {} if len(out) > 1 else pick({"maxLength": 9}, {"format": "date"}, {"format": "uuid"})
        elif kind == "integer":
            out |= pick({"minimum": -3, "maximum": 40}, {"exclusiveMinimum": 0, "maximum": 999}, {"multipleOf": 7})
        elif kind == "number":
            out |= pick({"minimum": 0.5, "maximum": 9}, {"exclusiveMaximum": 2, "minimum": -1.25})
        elif kind == "array":
            out |= {"items": make(depth - 1), "minItems": int(rng.integers(0, 2)), "maxItems": int(rng.integers(1, 4))}
            if rng.integers(3) == 0:
                out |= {"prefixItems": [make(depth - 1)]}
        elif kind == "object":
            names = ["a", "b c", 'q"', "ü"][: rng.integers(1, 5)]
            out["properties"] = {name: make(depth - 1) for name in names}
            out["required"] = [name for name in names if rng.integers(2)]
            out["additionalProperties"] = pick(False, False, {"type": "boolean"})
        return out

    whole = {"type": "object", "properties": {"top": make(2), "more": make(1)}, "required": ["top"]}
    return whole | pick({}, {"additionalProperties": False})


def test_random_texts_of_random_schemas_validate(compiler: GrammarCompiler) -> None:
    """Walked at random through the masks: what ends is JSON that the schema's own validator takes."""
    import jsonschema

    ended = refused = 0
    for seed in range(60):
        schema = schemas(seed)
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            compiled = compiler.compile(Structure.json_schema(schema))
        except UserError:
            refused += 1
            continue
        rng = np.random.default_rng(seed)
        for _ in range(2):
            matcher, tokens = compiled.matcher(), list[int]()
            for _ in range(160):
                allowed = np.flatnonzero(matcher.mask([]))
                plain = [token for token in allowed if token == 0 or 30 < token < 97]
                token = int(rng.choice(plain if plain else allowed))
                if token == 0:
                    jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
                    ended += 1
                    break
                tokens.append(token)
                matcher.advance([token])
    assert ended > 60 and refused < 10


def test_a_sentencepiece_tokenizer_with_byte_fallback() -> None:
    """As Llama's are, from tokenizer.json and from GGUF: spaces are ▁, and unknown letters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *'▁abcdefghijklmnopqrstuvwxyz{}":0189',
    ]
    merges = [("▁", "a"), ("▁", "{"), ('"', "a"), ('"', ":"), ("n", "a"), ("m", "e"), ("na", "me")]
    vocabulary = {word: i for i, word in enumerate([*words, *(a + b for a, b in merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    compiler = GrammarCompiler(tokenizer, len(vocabulary), {vocabulary["</s>"]})
    schema = {
        "type": "object",
        "properties": {"name": {"const": 9}},
        "required": ["name"],
        "additionalProperties": False,
    }
    for structure, expected in [
        (Structure.json_schema(schema), ["{", '"', "name", '":', "9", "}"]),
        (Structure.choice(["name é"]), ["name", "▁", "<0xC3>", "<0xA9>"]),
    ]:
        matcher, written = compiler.compile(structure).matcher(), list[int]()
        while not matcher.allows([], vocabulary["</s>"]):
            new = matcher.forced(3) or [int(matcher.mask([]).argmax())]
            matcher.advance(new)
            written += new
        assert written == [vocabulary[word] for word in expected]
    compiler.close()
