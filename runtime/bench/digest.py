"""Digests of a model's logits on a fixed text: the same on every machine, so that anybody can check what a run says.

They are SHA-256 over float32 numbers, little-endian, row after row. The text is a few token ids from a formula, so that
no tokenizer takes part: a prompt in one forward, some tokens one by one, and a tree of drafted ones, with every kind of
cache.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints.architecture import configuration
from runtime.checkpoints.open import open_checkpoint
from runtime.contract import CacheKind, Decoder, Rows
from runtime.errors import UserError
from runtime.files import read_json
from runtime.kernels.dispatch import choose
from runtime.model.base import BaseDecoder
from runtime.model.load import load, own_architecture

KINDS: tuple[CacheKind, ...] = ("float32", "int8", "int4")
PROMPT, STEPS = 16, 4
# Parents of the tree's rows, and how far each lies behind the text.
_TREE, _DEPTH = (-1, 0, 0, 1, 2, 4, -1), (0, 1, 1, 2, 2, 3, 0)
_TOKENS = PROMPT + STEPS + len(_TREE)
# 2^32 over the golden ratio: multiples of it are spread evenly (Knuth).
_SPREAD = 2_654_435_769
MANIFEST = "manifest.json"


_ADAPTED = "transformers runs this model, whose bits differ from machine to machine"
_LOCAL = "the kernels {!r} have bits of their own on every machine; use a native path, or reference"


class NoDigestError(UserError):
    """Why a model's logits have no digest."""


@torch.inference_mode()
def digests(decoder: Decoder) -> dict[str, str]:
    """By cache and part ("int8 tree"): the SHA-256 of its logits in hexadecimal.

    Raises NoDigestError for a model or kernels with other bits on other machines, fewer positions than the text has,
    and logits that are no finite numbers.
    """
    if not isinstance(decoder, BaseDecoder):
        raise NoDigestError(_ADAPTED)
    if not decoder.kernel.everywhere:
        raise NoDigestError(_LOCAL.format(decoder.kernels))
    if decoder.max_positions < PROMPT + STEPS + max(_DEPTH) + 1:
        raise NoDigestError(f"the model takes no more than {decoder.max_positions} tokens")
    ids = torch.arange(1, _TOKENS + 1) * _SPREAD % (1 << 32) * decoder.vocab_size >> 32
    found = {}
    for kind in dict.fromkeys((*KINDS, decoder.kv.kind)):
        for part, logits in _logits(decoder, ids, kind).items():
            if not torch.isfinite(logits).all():
                raise NoDigestError(f"logits hold NaN or Inf ({kind} {part})")
            found[f"{kind} {part}"] = hashlib.sha256(logits.numpy().astype("<f4").tobytes()).hexdigest()
    return found


def _logits(decoder: Decoder, ids: Tensor, kind: CacheKind) -> dict[str, Tensor]:
    cache = decoder.new_cache(kind)
    request = cache.open(_TOKENS)
    text, tree = ids[: PROMPT + STEPS], ids[PROMPT + STEPS :]

    def chain(first: int, count: int) -> Tensor:
        return decoder.forward(text[first : first + count], Rows.chains([(request, first, count)]), cache).logits

    prefill = chain(0, PROMPT)
    decode = torch.cat([chain(PROMPT + step, 1) for step in range(STEPS)])
    rows = Rows(torch.full((len(_TREE),), request), torch.tensor(_DEPTH) + len(text), torch.tensor(_TREE))
    return {"prefill": prefill, "decode": decode, "tree": decoder.forward(tree, rows, cache).logits}


def entry(model: Path, threads: int | None) -> dict[str, Any]:
    """What a run's manifest says of its model's directory under "logits": the digests, or null and why.

    `threads` as `load` has them. Loads the model only where it has digests.
    """
    why: str | None
    kernel = choose("auto", "cpu")
    if own_architecture(configuration(open_checkpoint(model))) is None:
        why = _ADAPTED
    elif not kernel.everywhere:
        why = _LOCAL.format(kernel.name)
    else:
        decoder = load(model, threads=threads).decoder
        try:
            return {"sha256": digests(decoder), "why": None}
        except NoDigestError as error:
            why = str(error)
    return {"sha256": None, "why": why}


def promised(model: Path) -> dict[str, Any] | None:
    """The entry of the run whose model's directory this is; None where it is no run's.

    Raises UserError for a broken one.
    """
    manifest = model.parent / MANIFEST
    if model.name != "model" or not manifest.is_file():
        return None
    found = read_json(manifest).get("logits") or {"sha256": None, "why": "it was written before there were digests"}
    expected = found.get("sha256") if isinstance(found, dict) else ()
    if not (expected is None or isinstance(expected, dict)):
        raise UserError(f"{manifest}: logits must hold digests by name, found something else: restore the file")
    return dict(found)


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The parts whose digests are not the expected ones."""
    return [part for part in {**expected, **found} if found.get(part) != expected.get(part)]
