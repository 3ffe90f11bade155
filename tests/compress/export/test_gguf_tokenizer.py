"""Tokenizers through GGUF: by the tokenizer.json that the file carries, by its lists, and by transformers' reading."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from compress.errors import UserError
from compress.export.gguf import tokenizer as gguf_tokenizer
from runtime.checkpoints.gguf import tokenizer as reader
from runtime.checkpoints.gguf.reader import read_header
from runtime.checkpoints.gguf.tokenizer import DEEPSEEK_3, LLAMA_3, QWEN_2, QWEN_35, SPLITS
from runtime.errors import UserError as RuntimeUserError

gguf = pytest.importorskip("gguf")

PEERS = Path(__file__).parents[3] / ".peers" / "bin" / "python"
TEXTS = (
    "class Counter:\n    def __init__(self, start=1234567):\n        self.count = start  # don't\n",
    "  two spaces, a tab\tand more…   ",
    "naïve café ½ 你好 🙂 <|im_start|>user\nhi<|end|>",
    "x" * 40 + "\r\n\r\n\t\n",
    "",
)


def _corpus() -> list[str]:
    return [path.read_text() for path in sorted(Path(__file__).parent.glob("test_g*.py"))] + list(TEXTS)


def _byte_level(steps: list[Any], whole: bool = False) -> Tokenizer:
    built = Tokenizer(models.BPE(ignore_merges=whole))
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(_corpus(), trainer)
    built.add_special_tokens(["<|im_start|>"])
    built.add_tokens([AddedToken("__init__", normalized=False)])
    return built


def _expression(*patterns: str, whole: bool = False) -> Tokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level([*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns), last], whole)


def _gpt_2(digits: bool) -> Tokenizer:
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return _byte_level([*first, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _sentencepiece(prefix: bool) -> Tokenizer:
    """As converted from SentencePiece: every pair that makes a token may be joined, in the order of the scores."""
    spaces = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=specials, show_progress=False)
    learner.train_from_iterator(_corpus()[:1], trainer)
    vocabulary = learner.get_vocab()
    merges = reader.merges_by_score(vocabulary, [-float(number) for number in range(len(vocabulary))])
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    built.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    built.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return built


KINDS: dict[str, tuple[Callable[[], Tokenizer], str, str | None]] = {
    "llama 3": (lambda: _expression(LLAMA_3, whole=True), "gpt2", "llama-bpe"),
    "llama 3's splits, merged": (lambda: _expression(LLAMA_3), "gpt2", "dbrx"),
    "qwen 2": (lambda: _expression(QWEN_2), "gpt2", "qwen2"),
    "qwen 3.5": (lambda: _expression(QWEN_35), "gpt2", "qwen35"),
    "deepseek 3": (lambda: _expression(*DEEPSEEK_3), "gpt2", "deepseek-v3"),
    "gpt 2": (lambda: _gpt_2(digits=False), "gpt2", "gpt-2"),
    "smollm": (lambda: _gpt_2(digits=True), "gpt2", "smollm"),
    "sentencepiece": (lambda: _sentencepiece(prefix=True), "llama", None),
    "sentencepiece without a first space": (lambda: _sentencepiece(prefix=False), "llama", None),
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|end|>{% endfor %}"


def _written(built: Tokenizer, folder: Path, spaced: bool, *, carries: bool = True, extra: int = 3) -> Path:
    """A GGUF file of the tokenizer alone; `extra` ids have no token."""
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    begin, end = ("<s>", "</s>") if spaced else ("<|begin|>", "<|end|>")
    settings = {"bos_token": {"content": begin}, "eos_token": end, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = max(built.get_vocab().values()) + 1 + extra
    vocabulary = gguf_tokenizer.read(folder, size)
    assert vocabulary is not None and len(vocabulary.tokens) == len(vocabulary.kinds) == size
    path = folder / "only.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_tokenizer.add(writer, folder, vocabulary, {})
    if not carries:
        del writer.kv_data[0][reader.JSON]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_same_however_the_file_is_read(kind: str, tmp_path: Path) -> None:
    make, model, pre = KINDS[kind]
    built = make()
    carried = _written(built, tmp_path / "carried", model == "llama")
    listed = _written(built, tmp_path / "listed", model == "llama", carries=False)
    metadata = read_header(listed).metadata
    assert metadata["tokenizer.ggml.model"] == model and metadata.get("tokenizer.ggml.pre") == pre
    for path in (carried, listed):
        found = reader.read_tokenizer(path)
        for text in TEXTS:
            wanted = built.encode(text).ids
            assert found(text)["input_ids"] == wanted, (path.parent.name, text)
            assert found.decode(wanted) == built.decode(wanted, skip_special_tokens=False)
        assert found.chat_template == TEMPLATE
        assert found.eos_token == ("</s>" if model == "llama" else "<|end|>")


@pytest.mark.parametrize("kind", ["llama 3's splits, merged", "qwen 2", "sentencepiece"])
def test_transformers_own_reading_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf")
    if not hasattr(mapping, "get_gguf_tokenizer"):
        pytest.skip("this transformers reads GGUF tokenizers in another way")
    make, model, _ = KINDS[kind]
    built = make()
    path = _written(built, tmp_path / "x", model == "llama")
    architecture, lists, _ = mapping.get_gguf_tokenizer(str(path))
    theirs, _ = mapping.convert_gguf_tokenizer(architecture, lists)
    # Where a text begins with spaces, its SentencePiece puts none before them; llama.cpp and tokenizer.json do.
    for text in TEXTS[: 1 if model == "llama" else 2]:
        assert theirs.encode(text, add_special_tokens=False).ids == built.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.is_file(), reason="no .peers environment: make peers")
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    make, model, _ = KINDS[kind]
    built = make()
    path = _written(built, tmp_path / "x", model == "llama")
    (tmp_path / "given.json").write_text(json.dumps({"tokens": [], "texts": TEXTS}))
    script = Path(__file__).parents[2] / "llama_cpp_logits.py"
    subprocess.run([PEERS, script, path, tmp_path / "given.json", tmp_path], check=True, timeout=60)
    found = json.loads((tmp_path / "ids.json").read_text())
    assert found == [built.encode(text, add_special_tokens=False).ids for text in TEXTS]


def test_ids_without_a_token_are_filled(tmp_path: Path) -> None:
    built = _gpt_2(digits=False)
    size = built.get_vocab_size()
    path = _written(built, tmp_path / "x", spaced=False, extra=2)
    metadata = read_header(path).metadata
    assert metadata["tokenizer.ggml.tokens"][-2:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]  # type: ignore[index]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()  # type: ignore[union-attr]
    assert kinds[-2:] == [reader.UNUSED] * 2
    assert kinds[built.token_to_id("<|im_start|>")] == reader.CONTROL
    assert kinds[built.token_to_id("__init__")] == reader.USER_DEFINED


def test_a_chat_template_of_its_own_goes_first(tmp_path: Path) -> None:
    built = _gpt_2(digits=False)
    folder = tmp_path / "x"
    _written(built, folder, spaced=False)
    settings = {"chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]}
    assert gguf_tokenizer._template(folder, settings) == "yes"
    (folder / "chat_template.jinja").write_text("own")
    assert gguf_tokenizer._template(folder, settings) == "own"


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    assert gguf_tokenizer.read(tmp_path, 10) is None
    path = tmp_path / "none.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_tokenizer.add(writer, tmp_path, None, {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(RuntimeUserError, match="must be gpt2 or llama, found 'no_vocab'"):
        reader.read_tokenizer(path)


def _rewritten(path: Path, key: str, value: Any) -> Path:
    header = read_header(path)
    changed = path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(changed, "llama")
    for name, found in (header.metadata | {key: value}).items():
        if name in ("general.architecture", reader.JSON) or found is None:
            continue
        if isinstance(found, bool):
            writer.add_bool(name, found)
        elif isinstance(found, int):
            writer.add_uint32(name, found)
        elif isinstance(found, str):
            writer.add_string(name, found)
        else:
            writer.add_array(name, list(found) if isinstance(found, list) else found.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return changed


@pytest.mark.parametrize(
    "kind, key, value, sentence",
    [
        ("gpt 2", "tokenizer.ggml.model", "bert", "must be gpt2 or llama, found 'bert'"),
        ("gpt 2", "tokenizer.ggml.pre", "chameleon", "'chameleon' is not known here"),
        ("gpt 2", "tokenizer.ggml.merges", ["a b c"], "must be pairs with a space between"),
        ("gpt 2", "tokenizer.ggml.merges", ["zzz qqq"], "its tokenizer cannot be built"),
        ("gpt 2", "tokenizer.ggml.merges", None, "tokenizer.ggml.merges must be a list of strings"),
        ("gpt 2", "tokenizer.ggml.token_type", [1, 1], "must have a number for each of"),
        ("sentencepiece", "tokenizer.ggml.scores", [0.5], "must have a number for each of"),
        ("sentencepiece", "tokenizer.ggml.bos_token_id", 1 << 20, "its tokenizer cannot be built|must be one of"),
    ],
)
def test_lists_that_make_no_tokenizer_are_refused(
    kind: str, key: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    path = _written(KINDS[kind][0](), tmp_path / "x", kind == "sentencepiece", carries=False)
    assert reader.read_tokenizer(_rewritten(path, "general.name", "the same"))("a b")["input_ids"]
    with pytest.raises(RuntimeUserError, match=sentence):
        reader.read_tokenizer(_rewritten(path, key, value))


def test_a_split_without_a_name_is_refused(tmp_path: Path) -> None:
    built = _expression(r"\w+")
    folder = tmp_path / "x"
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=r"expected a way of splitting text that llama\.cpp has a name for"):
        gguf_tokenizer.read(folder, 10_000)
    assert {name for name, split in SPLITS.items() if LLAMA_3 in split.pieces} >= {"llama-bpe", "dbrx"}
