"""The server's side of a model: its tokenizer, chat template and defaults, read without its weights."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.errors import UserError, fault_of
from runtime.files import read_json, regular
from runtime.sampling.detokenize import read_tokenizer
from runtime.serve.errors import invalid

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def import_tokenizers() -> None:
    """Imports what tokenizers are read with, which takes seconds."""
    from transformers import AutoTokenizer  # noqa: F401


class Vocabulary:
    """A tokenizer, and what single tokens look like.

    template  text of a chat template in place of the tokenizer's own.
    """

    def __init__(self, model: str, vocab_size: int, template: str | None = None) -> None:
        path = Path(model)
        if path.is_file():
            from runtime.checkpoints.gguf.tokenizer import read_tokenizer as read_from_gguf

            self.tokenizer: Any = read_from_gguf(path)
        else:
            self.tokenizer = read_tokenizer(path)
        if template is not None:
            self.tokenizer.chat_template = template
        self.vocab_size = vocab_size
        self.defaults = _defaults(path)
        self._special = {
            token.content: id_ for id_, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        self._bytes = _byte_levels() if "ByteLevel" in str(self.tokenizer.backend_tokenizer.decoder) else None
        self.shown = lru_cache(maxsize=65536)(self._shown)

    @property
    def special(self) -> dict[str, int]:
        """Ids of special tokens, by their texts."""
        return self._special

    def _shown(self, token: int) -> str:
        """A token alone, special ones too, as text."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        piece = self.tokenizer.convert_ids_to_tokens(token) if token < len(self.tokenizer) else None
        if piece is None:
            return b""
        if piece in self._special:
            return piece.encode()
        if self._bytes is not None and all(char in self._bytes for char in piece):
            return bytes(self._bytes[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return self.shown(token).encode("utf-8", "replace")

    def encode(self, text: str, special: bool | None, param: str) -> list[int]:
        """Tokens of a text. Raises ApiError for what is no Unicode or makes no token."""
        try:
            return list(self.tokenizer(text, add_special_tokens=special is not False, verbose=False)["input_ids"])
        except (TypeError, UnicodeEncodeError):
            raise invalid(f"{param} holds half a character (a lone surrogate), which is no Unicode", param) from None

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included. Raises ApiError for ids that there are not."""
        self.require_known(tokens, "tokens")
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def require_known(self, tokens: list[int], param: str) -> None:
        """Raises ApiError for ids outside the vocabulary."""
        if tokens and max(tokens) >= self.vocab_size:
            wrong = next(token for token in tokens if token >= self.vocab_size)
            raise invalid(
                f"{param} holds token {wrong}, but the model's vocabulary has the ids 0 to {self.vocab_size - 1}", param
            )

    def about(self) -> dict[str, Any]:
        """`GET /tokenizer_info`, as lm-eval reads it."""
        tokenizer = self.tokenizer
        named = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": self.vocab_size,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **named,
            "chat_template": tokenizer.chat_template,
        }


def read_template(path: Path) -> str:
    """A chat template's file. Raises UserError where it cannot be read."""
    try:
        return regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template: {path} is no text that can be read; give a Jinja file in UTF-8") from error


def _defaults(path: Path) -> dict[str, float]:
    """How the model's authors sample, from generation_config.json; OpenAI's temperature of 1 where it says nothing."""
    found: dict[str, float] = {"temperature": 1.0}
    file = path / "generation_config.json"
    if path.is_dir() and file.is_file():
        with fault_of(f"{path.name}/{file.name}", "it cannot be read"):
            said = read_json(file)
            found |= {key: said[key] for key in _SAMPLING if isinstance(said.get(key), int | float)}
    return found


def _byte_levels() -> dict[str, int]:
    """What byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
