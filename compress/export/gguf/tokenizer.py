"""The tokenizer of a model directory as GGUF keys: tokens, kinds, merges or scores, special tokens, chat template.

Beside them the file carries tokenizer.json itself (`tokenizer.huggingface.json`, a key of the format's specification),
so that a reader of tokenizer.json has the very same tokenizer.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import UserError
from runtime.checkpoints.gguf.tokenizer import (
    BYTE,
    CONTROL,
    DIGITS,
    GPT_2,
    JSON,
    NORMAL,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Split,
)
from runtime.files import read_json

if TYPE_CHECKING:
    from gguf import GGUFWriter

_SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in llama.cpp's words.

    model   "gpt2" (byte-level BPE) or "llama" (SentencePiece's BPE).
    pre     name of the splitting, of "gpt2".
    tokens  one for each id, `kinds` and (of "llama") `scores` likewise; `merges` of "gpt2".
    spaced  whether a space comes before a text, of "llama".
    """

    model: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    pre: str | None = None
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    spaced: bool = True


def read(folder: Path, size: int) -> Vocabulary | None:
    """The tokenizer of a model directory; `size` ids, those without a token filled. None without a tokenizer.json.

    Raises UserError for a tokenizer that llama.cpp has no words for, and for more tokens than ids.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise UserError(f"{folder.name}/tokenizer.json: expected a BPE tokenizer for GGUF, found {model.get('type')!r}")
    added = {int(token["id"]): token for token in content.get("added_tokens") or ()}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    if max(tokens, default=0) >= size:
        raise UserError(f"{folder.name}/tokenizer.json: expected ids below {size}, found {max(tokens)}")
    listed = tuple(tokens.get(number, f"[PAD{number}]") for number in range(size))
    spaced = bool(model.get("byte_fallback"))
    kinds = tuple(_kind(number, tokens, added, model, spaced) for number in range(size))
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if spaced:
        return Vocabulary("llama", listed, kinds, scores=_scores(listed, pairs), spaced=_prefixed(content))
    return Vocabulary(
        "gpt2", listed, kinds, pre=_pre(folder.name, content, model), merges=tuple(" ".join(pair) for pair in pairs)
    )


def _kind(number: int, tokens: dict[int, str], added: dict[int, Any], model: dict[str, Any], spaced: bool) -> int:
    if number not in tokens:
        return UNUSED
    if spaced and tokens[number] == model.get("unk_token"):
        return UNKNOWN
    if number in added:
        return CONTROL if added[number].get("special") else USER_DEFINED
    piece = tokens[number]
    return BYTE if spaced and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") else NORMAL


def _scores(tokens: tuple[str, ...], pairs: list[tuple[str, ...]]) -> tuple[float, ...]:
    """Scores by which SentencePiece would merge in this order: minus the rank of the first merge that makes a token.

    Tokens that no merge makes (single characters, bytes, special ones) have none, and 0 is as good as another.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    return tuple(float(-ranks.get(token, 0)) for token in tokens)


def _prefixed(content: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a space before a text."""
    steps = [*_steps(content.get("normalizer"), "normalizers"), *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    return any(
        (step["type"] == "Prepend" and step.get("prepend") == _SPACE)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one step that there is."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _pre(shown: str, content: dict[str, Any], model: dict[str, Any]) -> str:
    """llama.cpp's name of how a byte-level tokenizer splits text."""
    pieces: list[str] = []
    byte_level = False
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        pattern = step.get("pattern") or {}
        if step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            pieces.append(pattern.get("Regex") or f"the text {pattern.get('String')!r}")
        elif step["type"] == "Digits" and step.get("individual_digits"):
            pieces.append(DIGITS)
        elif step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            byte_level = True
            pieces += [GPT_2] if step.get("use_regex", True) else []
        else:
            pieces.append(step["type"])
    wanted = Split(tuple(pieces), whole=bool(model.get("ignore_merges")))
    for name, known in SPLITS.items():
        if byte_level and known == wanted:
            return name
    raise UserError(
        f"{shown}/tokenizer.json: expected a way of splitting text that llama.cpp has a name for"
        f" ({', '.join(SPLITS)}), found {wanted.pieces}, ignore_merges {wanted.whole}: GGUF cannot hold this tokenizer"
    )


def add(writer: "GGUFWriter", folder: Path, vocabulary: Vocabulary | None, config: dict[str, Any]) -> None:
    """Adds the tokenizer's keys; without a tokenizer the file says so."""
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.model == "llama":
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.spaced)
    else:
        writer.add_token_merges(list(vocabulary.merges))
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    for name, write in (
        ("bos", writer.add_bos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        number = _named(settings.get(f"{name}_token"), ids, config.get(f"{name}_token_id"))
        if number is not None:
            write(number)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    end = _named(settings.get("eos_token"), ids, ends[0])
    if end is not None:
        writer.add_eos_token_id(end)
    turns = [number for number in ends if isinstance(number, int) and number != end]
    if turns:
        writer.add_eot_token_id(turns[0])
    content = read_json(folder / "tokenizer.json")
    # Whether the tokenizer puts the token that begins a text before every text.
    steps = _steps(content.get("post_processor"), "processors")
    templates = (step["single"] for step in steps if step["type"] == "TemplateProcessing")
    first: dict[str, Any] = next((template[0] for template in templates if template), {})
    begin = _named(settings.get("bos_token"), ids, None)
    writer.add_add_bos_token(begin is not None and ids.get(first.get("SpecialToken", {}).get("id")) == begin)
    if template := _template(folder, settings):
        writer.add_chat_template(template)
    writer.add_string(JSON, json.dumps(content, ensure_ascii=False, separators=(",", ":")))


def _named(token: Any, ids: dict[str, int], default: Any) -> int | None:
    """The id of a token that tokenizer_config.json names (a string, or a mapping with its content)."""
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in ids:
        return ids[text]
    return default if isinstance(default, int) else None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, else the one in tokenizer_config.json (of several the default)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
