"""Whose text a student learns on: the training text, what the teacher writes, or what the student itself writes.

On its own text a student meets its own mistakes, and a teacher that answers there corrects them (GKD, Agarwal et al.
2023, 2306.13649; for drafts, DistillSpec, Zhou et al. 2023, 2310.08461). A teacher's samples alone are sequence-level
distillation (Kim and Rush 2016, 1606.07947).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.artifact import files
from compress.progress import Progress
from runtime import load
from runtime.contract import Decoder, Rows

Writer = Callable[[Tensor, int, torch.Generator], Tensor]
"""Prompts (B, P) int64, new tokens N, random numbers → (B, P + N) int64 that begin with the prompts."""


def gumbel_sample(logits: Tensor, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
    """(rows,) int64: one token of each softmax(logits / T), logits (rows, V); T = 0 is the most probable one.

    The largest of p / Exp(1) is distributed as p: one pass instead of a cumulative sum.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    noise = torch.empty(logits.shape, dtype=torch.float32).exponential_(generator=generator).to(logits.device)
    return ((logits.float() / temperature).softmax(dim=-1) / noise).argmax(dim=-1)


def writer_of(decoders: Sequence[Decoder], choose: Callable[[list[Tensor], torch.Generator], Tensor]) -> Writer:
    """Continues prompts with runtime decoders that all read every text, one forward of each a token.

    choose  the logits (B, V) of each decoder, random numbers → (B,) int64.
    """

    def write(prompts: Tensor, new: int, generator: torch.Generator) -> Tensor:
        rows, length = prompts.shape
        caches = [(decoder, decoder.new_cache()) for decoder in decoders]
        handles = [[cache.open(length + new) for _ in range(rows)] for _, cache in caches]
        out, fed, start = [prompts], prompts, 0
        at = torch.arange(1, rows + 1) * length - 1
        try:
            for _ in range(new):
                found = []
                for (decoder, cache), mine in zip(caches, handles, strict=True):
                    spans = Rows.chains([(handle, start, fed.shape[1]) for handle in mine])
                    with torch.autocast(decoder.device.type, enabled=False):
                        found.append(decoder.forward(fed.flatten().to(decoder.device), spans, cache, at).logits)
                start, fed = start + fed.shape[1], choose(found, generator).cpu().unsqueeze(1)
                at = torch.arange(rows)
                out.append(fed)
        finally:
            for (_, cache), mine in zip(caches, handles, strict=True):
                for handle in mine:
                    cache.close(handle)
        return torch.cat(out, dim=1)

    return write


def decoder_writer(decoder: Decoder, temperature: float = 1.0) -> Writer:
    """Continues prompts with one runtime decoder.

    On a CPU the native kernels write about twice as many tokens a second as transformers does.
    """
    return writer_of([decoder], lambda found, generator: gumbel_sample(found[0], generator, temperature))


def model_writer(model: Any, temperature: float = 1.0) -> Writer:
    """The same with a transformers model, on its device and with its weights as they are now."""

    @torch.no_grad()
    def write(prompts: Tensor, new: int, generator: torch.Generator) -> Tensor:
        training = model.training
        model.eval()
        device = next(model.parameters()).device
        out, step, cache = [prompts], prompts.to(device), None
        for _ in range(new):
            found = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            step = gumbel_sample(found.logits[:, -1], generator, temperature).unsqueeze(1)
            out.append(step.to(prompts.device))
        model.train(training)
        return torch.cat(out, dim=1)

    return write


def snapshot(model: Any, folder: Path, threads: int | None) -> Decoder:
    """A transformers model's weights of this moment as a runtime decoder, by way of `folder`, which is written anew.

    60 ms for a draft of a million weights; so a whole batch is written by one snapshot.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    return load(folder, threads=threads).decoder


@dataclass(frozen=True)
class Samples:
    """A teacher's texts, and the seconds that writing them took.

    tokens  (n, length) int32 or uint16, memory-mapped.
    """

    tokens: np.ndarray[tuple[int, ...], np.dtype[Any]]
    seconds: float

    def take(self, numbers: Tensor) -> Tensor:
        """(m, length) int64 of these numbers (m,)."""
        return torch.from_numpy(self.tokens[numbers.numpy()].astype(np.int64))


def write_samples(
    path: Path,
    writers: Sequence[Writer],
    prompts: Callable[[int, torch.Generator], Tensor],
    count: int,
    length: int,
    seed: int,
    progress: Progress,
    seconds: float | None = None,
    rows: int = 32,
) -> Samples:
    """`count` texts of `length` tokens that the writers continue in turn, `rows` at a time: written once to `path`.

    prompts  (rows, random numbers) → prompts (rows, P) int64 with P < length.
    seconds  fewer texts where these have passed, but one batch of each writer at least.
    A whole file that is there already, asked for with the same arguments, is taken as it is.
    """
    key = {"asked": count, "length": length, "seed": seed}
    found = files.kept(path, key)
    if found is None:
        began, generator, written, found = time.monotonic(), torch.Generator().manual_seed(seed), 0, dict[str, Any](key)
        with files.keeping(path, found) as file:
            for number, first in enumerate(range(0, count, rows)):
                spent = time.monotonic() - began
                if seconds is not None and spent > seconds and number >= len(writers):
                    break
                progress("samples", first, count)
                starts = prompts(min(rows, count - first), generator)
                text = writers[number % len(writers)](starts, length - starts.shape[1], generator)
                file.write(text.numpy().astype("<i4").tobytes())
                written += len(starts)
            found |= {"texts": written, "seconds": time.monotonic() - began}
        progress("samples", count, count)
    shape = (int(found["texts"]), length)
    return Samples(np.memmap(path, dtype="<i4", mode="r", shape=shape), float(found["seconds"]))
