"""Tokenizer and token files of the pair: written once into a work directory, memory-mapped while training."""

import json
import random
import sys
from pathlib import Path

import numpy as np
from corpus import STANDARD_LIBRARY, collect, megabytes
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from calib.sources import SourceFile

VOCABULARY = 4096
END = "<|endoftext|>"
# The split of Llama 3's tokenizer: engines that read GGUF know it by name, and it keeps Python's indents together.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(files: list[SourceFile], seed: int) -> Tokenizer:
    """Byte-level BPE over a 30 MB sample, a third of it the standard library."""
    chooser = random.Random(seed)
    library = [f.text for f in files if f.package == STANDARD_LIBRARY]
    others = [f.text for f in files if f.package != STANDARD_LIBRARY]
    sample, size = list(library), 0
    for text in chooser.sample(others, len(others)):
        sample.append(text)
        size += len(text)
        if size > 20_000_000:
            break
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: list[SourceFile]) -> np.ndarray:
    """All files as one uint16 stream, each one preceded by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    parts: list[np.ndarray] = []
    for start in range(0, len(files), 256):
        for row in tokenizer.encode_batch([f.text for f in files[start : start + 256]]):
            parts.append(np.asarray([end, *row.ids], dtype=np.uint16))
    return np.concatenate(parts)


def prepare(work: Path, seed: int = 0) -> None:
    """Writes tokenizer/, library.bin, packages.bin, held_library.bin, held_packages.bin and corpus.json once."""
    if (work / "corpus.json").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    corpus = collect()
    chooser = random.Random(seed)
    chooser.shuffle(corpus.train)
    tokenizer = train_tokenizer(corpus.train, seed)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=1024
    ).save_pretrained(work / "tokenizer")
    sizes = {}
    for name, files in (("", corpus.train), ("held_", corpus.held_out)):
        for kind, wanted in (("library", True), ("packages", False)):
            chosen = [f for f in files if (f.package == STANDARD_LIBRARY) == wanted]
            stream = encode(tokenizer, chosen)
            stream.tofile(work / f"{name}{kind}.bin")
            sizes[f"{name}{kind}"] = {
                "files": len(chosen),
                "megabytes": round(megabytes(chosen), 3),
                "bytes": sum(len(f.text.encode()) for f in chosen),
                "tokens": len(stream),
            }
    about = {
        **{"sha256": corpus.sha256(), "interpreter": sys.version.split()[0], "packages": corpus.packages},
        **{"left_out": corpus.left_out, "sizes": sizes},
    }
    (work / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")


class Stream:
    """Token windows of a file in a seeded random order, without repeats within one epoch."""

    def __init__(self, path: Path, seed: int):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.random = np.random.default_rng(seed)
        self.order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.length = 0

    def take(self, rows: int, length: int) -> np.ndarray:
        """(rows, length + 1) token ids; inputs are all but the last column, labels all but the first."""
        out: list[NDArray[np.uint16]] = []
        while len(out) < rows:
            if not len(self.order) or length != self.length:
                self.length = length
                offset = int(self.random.integers(0, length))
                self.order = self.random.permutation((len(self.tokens) - 1 - offset) // length) * length + offset
            start, self.order = int(self.order[0]), self.order[1:]
            out.append(self.tokens[start : start + length + 1])
        return np.stack(out).astype(np.int64)
