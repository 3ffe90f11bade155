"""A real byte-level tokenizer, trained in milliseconds."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from calib.sources import standard_library


def byte_level(start: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for _, (_, text) in zip(range(8), standard_library(), strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    if start:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(start=False)


@pytest.fixture(scope="session")
def starting_tokenizer() -> PreTrainedTokenizerFast:
    """One that puts a start token before every text, as Llama's does."""
    return byte_level(start=True)
