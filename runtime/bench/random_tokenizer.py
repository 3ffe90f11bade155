"""A tokenizer for models with random weights: servers and grammars want one."""

import string
from itertools import chain, islice
from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer for random weights: bytes, and for the other ids words of two, then of three letters and digits.

    A word is the merge of a shorter one and a character, so that engines which want merges take it, too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.ascii_letters + string.digits
    pairs = [(one, other) for one in characters for other in characters]
    triples = ((first + second, third) for first, second in pairs for third in characters)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    merges = list(islice(chain(pairs, triples), vocab_size - len(letters)))
    names = [*letters, *(f"{start}{end}" for start, end in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
