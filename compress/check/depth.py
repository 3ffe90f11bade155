"""Both models on a text, block by block: after which block they part, and what becomes of the next token.

Each block is read twice, from the original and from the checked model, so that no more than two are in memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from calib import corpora
from compress.calibration.capture import Capture
from compress.calibration.carried import Call, Row
from compress.check.findings import Depth, Finding
from compress.check.layers import by_weight, read, whole
from compress.check.opening import Opened
from compress.errors import USER_ERRORS, UserError
from compress.logits import kl_rows, log_probabilities
from compress.model.block import Block
from compress.model.block_loader import BlockLoader
from compress.model.structure import read_structure
from compress.progress import Progress
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.rotation import rotation_of
from runtime.checkpoints.safetensors import Entry, Shards
from runtime.errors import UserError as RuntimeFloorError
from runtime.sampling.detokenize import encode_plain, read_tokenizer

# A block is named where it alone errs so many times as much as the others do, and at least so much.
_TIMES, _AT_LEAST = 4.0, 0.25
# Below this agreement the two models have nothing in common.
_AGREEMENT = 0.1
_ROWS = 32
_FEWEST = 8


class PlainShards(Shards):
    """Weights by their plain names, dequantised when they are asked for."""

    def __init__(self, opened: Opened):
        self.directory, self.files, self._opened = opened.path, opened.tensors.files, opened
        self._entries = {name: _entry(opened, stored) for name, stored in by_weight(opened.tensors).items()}

    def __getitem__(self, name: str) -> Tensor:
        self.entry(name)
        return whole(read(self._opened, name))


def _entry(opened: Opened, stored: Sequence[str]) -> Entry:
    """Of a packed weight the type that it is dequantised to; its shape is not asked for."""
    first = opened.tensors.entry(stored[0])
    return first if len(stored) == 1 else replace(first, dtype="F32")


class Side:
    """One of the two models: its front, its blocks one at a time, its head."""

    def __init__(self, opened: Opened, described: Path, tokens: Tensor):
        """`described` has the config.json to build it by."""
        self.structure = read_structure(described)
        self.checkpoint = Checkpoint(opened.path, opened.config, PlainShards(opened))
        self.loader = BlockLoader(self.checkpoint, self.structure)
        self._names: dict[int | None, list[str]] = {}
        for name in self.checkpoint.names():
            if self.structure.carried(name) is None and not self.structure.is_tied(name):
                self._names.setdefault(self.structure.block(name), []).append(name)
        self._front = Capture(self.loader, self._names.get(None, []))
        self.tokens = tokens
        self.row, self.window = next(self._front.inputs(tokens))

    def load(self, number: int) -> Block:
        """A block with its weights."""
        return self.loader.load(number, self._names.get(number, []))

    def run(self, block: Block, row: Row, window: Tensor) -> tuple[Tensor, Row, Tensor]:
        """What a block makes of rows: hidden states (1, T, D), and what goes into the next block."""
        call: Call = self._front.calls[block.number]
        given, own, shared = row.split(window)
        args, kwargs, left = call.of_window(own, shared)
        with torch.no_grad():
            out = block.module(given, *args, **kwargs)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden, *row.following(window, hidden, left)

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, vocabulary) of the last block's hidden states (1, T, D)."""
        model: Any = self.structure.model
        head = model.get_output_embeddings()
        name = next((n for n in self._names.get(None, []) if _is_head(self.structure, n)), None)
        if name is None:
            name = next(n for n in self._names[None] if self._kind(n) == "embedding")
        head.weight = nn.Parameter(self.checkpoint.tensor(name).float(), requires_grad=False)
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in self.checkpoint.names() and head.bias is not None:
            head.bias = nn.Parameter(self.checkpoint.tensor(bias).float(), requires_grad=False)
        layers = self.structure.layers
        problem: Exception | None = None
        for form in (lambda x: x, lambda x: (x, None), lambda x: (x, None, None)):
            try:
                for layer in layers:
                    layer.__dict__["forward"] = lambda *_, _form=form, **__: _form(hidden)
                with torch.no_grad():
                    found: Tensor = model(input_ids=self.tokens, use_cache=False).logits[0]
                return found
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                problem = error
            finally:
                for layer in layers:
                    layer.__dict__.pop("forward", None)
        raise UserError(f"{type(model).__name__}: its head cannot be run alone ({problem})")

    def _kind(self, name: str) -> str:
        parameter = self.structure.find(name)
        return "" if parameter is None else parameter.kind


def _is_head(structure: Any, name: str) -> bool:
    parameter = structure.find(name)
    return parameter is not None and parameter.kind == "head"


def run_text(
    opened: Opened, source: Opened, file: Path | None, tokens: int, blocked: str | None, progress: Progress
) -> tuple[Depth | None, list[Finding]]:
    """The two models on a text; nothing and a note where one of them cannot be run.

    blocked  why the checked model cannot. Raises UserError for a text that cannot be read.
    """
    if blocked is not None:
        return None, [_not_run(blocked)]
    if source.header is not None:
        return None, [_not_run("the original is a GGUF file, and its own directory is needed for that")]
    try:
        ids, name = _tokens(source.path, file, tokens)
    except USER_ERRORS as error:
        if file is not None:
            raise
        return None, [_not_run(str(error))]
    try:
        ours = Side(opened, source.path if opened.header is not None else opened.path, ids)
        # Turned like ours the original may have a head of its own, as our config.json says.
        turned = rotation_of(source.config) == rotation_of(opened.config) is not None
        theirs = Side(source, opened.path if turned else source.path, ids)
        if ours.structure.count != theirs.structure.count:
            return None, [_not_run(f"it has {ours.structure.count} blocks, the original {theirs.structure.count}")]
        return _compare(ours, theirs, name, progress)
    except (UserError, RuntimeFloorError) as error:
        return None, [_not_run(str(error))]


def _not_run(why: str) -> Finding:
    return Finding(level="note", kind="depth", where="text", says=f"was not run: {why}")


def _tokens(folder: Path, file: Path | None, count: int) -> tuple[Tensor, str]:
    """(1, T) int64, and the text's name."""
    corpus = corpora.load(None if file is None else str(file))
    tokenizer = read_tokenizer(folder)
    ids: list[int] = []
    for document in corpus.documents:
        ids += encode_plain(tokenizer, document[: 3 * count])
        if len(ids) >= count:
            break
    if len(ids) < _FEWEST:
        raise UserError(f"{corpus.name}: expected at least {_FEWEST} tokens of text, found {len(ids)}")
    return torch.tensor([ids[:count]]), corpus.name


def _compare(ours: Side, theirs: Side, name: str, progress: Progress) -> tuple[Depth, list[Finding]]:
    inherited: list[float] = []
    own: list[float] = []
    (row, window), (real_row, real_window) = (ours.row, ours.window), (theirs.row, theirs.window)
    count = theirs.structure.count
    given, given_real = row.split(window)[0], real_row.split(real_window)[0]
    start = _off(given, given_real)
    hidden, real = given, given_real
    for number in range(count):
        progress("quality", number, count)
        block = theirs.load(number)
        before_row, before = real_row, real_window
        real, real_row, real_window = theirs.run(block, real_row, real_window)
        block = ours.load(number)
        alone = ours.run(block, before_row, before)[0]
        hidden, row, window = ours.run(block, row, window)
        if not bool(torch.isfinite(hidden).all()):
            where = f"{theirs.structure.blocks_at}.{number}"
            says = "its output on a text has NaN or infinite values"
            return Depth(text=name, tokens=window.shape[1], inherited=inherited, own=own), [
                Finding(level="broken", kind="depth", where=where, says=says)
            ]
        inherited.append(_off(hidden, real))
        own.append(_off(alone, real))
    progress("quality", count, count)
    kl, agreement, flips = _next_tokens(ours.logits(hidden), theirs.logits(real))
    depth = Depth(
        text=name,
        tokens=real.shape[1],
        inherited=inherited,
        own=own,
        kl_divergence=kl,
        top1_agreement=agreement,
        flips=flips,
    )
    return depth, _findings(depth, start, theirs.structure.blocks_at)


def _off(found: Tensor, real: Tensor) -> float:
    """Relative error, the median over tokens: the first token's state is larger than all others in many models."""
    rows = (found - real)[0].norm(dim=1) / real[0].norm(dim=1).clamp_min(1e-20)
    return float(rows.median())


def _next_tokens(ours: Tensor, theirs: Tensor) -> tuple[float, float, int]:
    """KL(original ‖ checked) in nats a token; the share of places with one most likely token, and how many differ."""
    divergences = [
        kl_rows(log_probabilities(p), log_probabilities(q))
        for p, q in zip(theirs.split(_ROWS), ours.split(_ROWS), strict=True)
    ]
    flips = int((ours.argmax(1) != theirs.argmax(1)).sum())
    return float(torch.cat(divergences).mean()), 1 - flips / len(ours), flips


def _findings(depth: Depth, start: float, blocks_at: str) -> list[Finding]:
    findings = []
    usual = median(depth.own)
    off = [number for number, error in enumerate(depth.own) if error > max(_TIMES * usual, _AT_LEAST)]
    if start > _AT_LEAST:
        says = (
            f"hidden states before the first block differ by {start:.2g}: embeddings, or what is multiplied onto them"
        )
        findings.append(Finding(level="suspicious", kind="depth", where="embedding", says=says))
    if off:
        says = f"the first block that is off: given the original's hidden states it errs by {depth.own[off[0]]:.2g},"
        says += f" other blocks by {usual:.2g}"
        findings.append(Finding(level="suspicious", kind="depth", where=f"{blocks_at}.{off[0]}", says=says))
    if depth.top1_agreement is not None and depth.top1_agreement < _AGREEMENT:
        says = f"the most likely next token is the original's in {depth.top1_agreement:.0%} of the places only"
        findings.append(Finding(level="suspicious", kind="depth", where="text", says=says))
    return findings
