"""A tokenizer from a GGUF file: from the tokenizer.json that it carries, or from its tokens, merges and scores."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.reader import Header, read_header
from runtime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

DIGITS = "digits"
"""A piece of `Split.pieces`: every digit alone."""
GPT_2 = "gpt-2"
"""A piece of `Split.pieces`: the expression that GPT-2 brought, which the byte-level step itself applies."""

_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _END
QWEN_2 = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _END
QWEN_35 = (
    _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|" + _CASED_END
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    r"|\p{N}{1,3}|" + _CASED_END
)


@dataclass(frozen=True)
class Split:
    """pieces: expressions, DIGITS or GPT_2, one after the other. whole: a word that is a token is not merged up to."""

    pieces: tuple[str, ...]
    whole: bool = False


SPLITS: dict[str, Split] = (
    dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "glm4"), Split((LLAMA_3,), True))
    | dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((LLAMA_3,)))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open"), Split((QWEN_2,)))
    | {"qwen35": Split((QWEN_35,)), "tekken": Split((TEKKEN,), whole=True)}
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((GPT_4O,)))
    | dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), Split((GPT_2,)))
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), Split((DIGITS, GPT_2)))
    | dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Split(DEEPSEEK_3))
)
"""llama.cpp's name → the way. Of several names for one way the first is written."""


JSON = "tokenizer.huggingface.json"
# Kinds of token (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


def read_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises UserError where there is none, where its kind or its splitting is not known, or where its parts do not fit
    together.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    header = read_header(path)
    said = header.metadata.get(JSON)
    try:
        built = Tokenizer.from_str(said) if isinstance(said, str) else build(header)
        special = {
            f"{name}_token": built.id_to_token(number)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if isinstance(number := header.metadata.get(f"tokenizer.ggml.{key}_token_id"), int)
        }
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=built, **special)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception for parts that contradict each other
        why = " ".join(str(error).split())
        shown = f"{path.name}: its tokenizer cannot be built"
        raise UserError(f"{shown}: {why}; give the original model directory") from error
    if isinstance(template := header.metadata.get("tokenizer.chat_template"), str):
        tokenizer.chat_template = template
    return tokenizer


def build(header: Header) -> "Tokenizer":
    """The tokenizer that a file's own lists describe: "gpt2" is a byte-level BPE, "llama" SentencePiece's BPE.

    Raises UserError as `read_tokenizer`.
    """
    from tokenizers import AddedToken, processors

    shown, kind = header.path.name, header.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{shown}: tokenizer.ggml.model must be gpt2 or llama, found {kind!r}; give the original model directory"
        )
    tokens = _strings(header, "tokens")
    kinds = [NORMAL] * len(tokens)
    if header.metadata.get("tokenizer.ggml.token_type") is not None:
        kinds = [int(number) for number in _numbers(header, "token_type", len(tokens))]
    built = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens)
    pairs = list(zip(tokens, kinds, strict=True))
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in pairs if k == CONTROL])
    built.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in pairs if k == USER_DEFINED])
    first = header.metadata.get("tokenizer.ggml.bos_token_id")
    if header.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and isinstance(first, int):
        if not 0 <= first < len(tokens):
            raise UserError(f"tokenizer.ggml.bos_token_id must be one of {len(tokens)} tokens, found {first}")
        begin = tokens[first]
        built.post_processor = processors.TemplateProcessing(single=[begin, "$A"], special_tokens=[(begin, first)])
    return built


def _strings(header: Header, key: str) -> list[str]:
    found = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found:
        what = type(found).__name__
        raise UserError(f"{header.path.name}: tokenizer.ggml.{key} must be a list of strings, found {what}")
    return found


def _numbers(header: Header, key: str, count: int) -> NDArray[Any]:
    found = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, np.ndarray) or len(found) != count:
        raise UserError(f"{header.path.name}: tokenizer.ggml.{key} must have a number for each of {count} tokens")
    return found


def _byte_level(header: Header, tokens: list[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = header.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise UserError(
            f"{header.path.name}: tokenizer.ggml.pre {name!r} is not known here ({', '.join(SPLITS)} are); give the"
            " original model directory"
        )
    split = SPLITS[name]
    lines = _strings(header, "merges")
    if any(line.count(" ") != 1 for line in lines):
        raise UserError(f"{header.path.name}: tokenizer.ggml.merges must be pairs with a space between")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole))
    steps: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if piece == DIGITS
        else pre_tokenizers.Split(Regex(piece), behavior="isolated")
        for piece in split.pieces
        if piece != GPT_2
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT_2 in split.pieces))
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    built.decoder = decoders.ByteLevel()
    return built


def _sentencepiece(header: Header, tokens: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(header, "scores", len(tokens))
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    name = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = merges_by_score(vocabulary, scores.astype(np.float64).tolist())
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token=name, fuse_unk=True, byte_fallback=True))
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return built


def merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The pairs that SentencePiece's BPE may join, best first: all that make a token, by that token's score."""
    found = [
        (-scores[number], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, number in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]
