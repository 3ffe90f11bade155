"""How byte-level tokenizers cut text before they merge. A GGUF file names the way (`tokenizer.ggml.pre`)."""

from dataclasses import dataclass

DIGITS = "digits"
"""A piece of `Split.pieces`: every digit alone."""
GPT_2 = "gpt-2"
"""A piece of `Split.pieces`: the expression that GPT-2 brought, which the byte-level step itself applies."""

_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _END
QWEN_2 = _SHORT_FORMS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _END
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


SPLITS: dict[str, Split] = {
    "llama-bpe": Split((LLAMA_3,), whole=True),
    "llama3": Split((LLAMA_3,), whole=True),
    "llama-v3": Split((LLAMA_3,), whole=True),
    "dbrx": Split((LLAMA_3,)),
    "smaug-bpe": Split((LLAMA_3,)),
    "qwen2": Split((QWEN_2,)),
    "deepseek-r1-qwen": Split((QWEN_2,)),
    "tekken": Split((TEKKEN,), whole=True),
    "gpt-4o": Split((GPT_4O,)),
    "gpt-2": Split((GPT_2,)),
    "smollm": Split((DIGITS, GPT_2)),
}
"""llama.cpp's name → the way. Of several names for one way the first is written."""
