"""Which weights a model needs, what there are, and their shapes: by its own config.json, and by the original."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from compress.check.examine import Examined
from compress.check.findings import Finding, Kind, Level
from compress.check.layers import by_weight, experts, read, whole
from compress.check.opening import Opened
from compress.check.originals import DRAFT, HEADS, Originals, find_embedding
from compress.errors import UserError
from compress.model.structure import ModelStructure, read_structure
from runtime.checkpoints.architecture import describe
from runtime.checkpoints.gguf.names import FORMS
from runtime.checkpoints.gguf.parts import parts
from runtime.errors import UserError as RuntimeFloorError

# Files of drafts that stand beside a model.
_DRAFT_FILES = ("*medusa*", "*eagle*", "*mtp*")
_HARMLESS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".masked_bias", ".position_ids")
# Keys by which families say that blocks follow the last one, to guess further tokens.
_DRAFT_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MOST_NAMED = 6


def _finding(level: Level, kind: Kind, where: str, says: str) -> Finding:
    return Finding(level=level, kind=kind, where=where, says=says)


def structure_of(opened: Opened, findings: list[Finding]) -> ModelStructure | None:
    """What transformers makes of config.json; None for GGUF, and with a finding where it makes nothing of it."""
    if opened.header is not None or not opened.config:
        return None
    try:
        return read_structure(opened.path)
    except UserError as error:
        says = str(error).removeprefix(f"{opened.path.name}/config.json: ")
        findings.append(_finding("suspicious", "config", "config.json", says))
        return None


def check_names(opened: Opened, structure: ModelStructure | None, originals: Originals | None) -> list[Finding]:
    """Weights that are missing, and weights that nothing needs."""
    weights = by_weight(opened.tensors)
    if not weights:
        return []
    findings = _in_lost_files(opened)
    lost = set(by_weight(opened.lost))
    if structure is not None:
        findings += _by_structure(weights, structure, originals, lost)
    elif opened.header is not None and opened.config:
        findings += _by_parts(opened, weights)
    if originals is not None and structure is None:
        gone = [n for n in originals.names if n not in weights and not DRAFT.search(n) and n not in HEADS]
        if opened.header is None and opened.config:
            findings += _missing(gone)
    return [*findings, *_gaps(weights)]


def _in_lost_files(opened: Opened) -> list[Finding]:
    """Parts of packed weights without the others."""
    findings = []
    for name, stored in by_weight(opened.tensors).items():
        endings = {part.rpartition(".")[2] for part in stored}
        needed = next((set(parts) for first, parts in _COMPLETE.items() if first in endings), set())
        if opened.quantization and (gone := sorted(needed - endings)):
            prefix = name.removesuffix(".weight")
            says = f"tensor {prefix}.{gone[0]} is missing beside {', '.join(sorted(endings))}"
            findings.append(_finding("broken", "missing", f"{prefix}.{gone[0]}", says))
    return findings


_COMPLETE: Mapping[str, tuple[str, ...]] = {
    "qweight": ("qzeros", "scales"),
    "qzeros": ("qweight", "scales"),
    "weight_packed": ("weight_scale", "weight_shape"),
    "SCB": ("weight",),
}


def _by_structure(
    weights: Mapping[str, Sequence[str]],
    structure: ModelStructure,
    originals: Originals | None,
    lost: Collection[str],
) -> list[Finding]:
    given = {structure.names.place(name).name for name in weights}
    tied = structure.tied
    absent = [p for p in structure.parameters if p not in given and tied.get(p, p) not in given]
    absent = [p for p in absent if not any(other == p and name in given for name, other in tied.items())]
    findings = _missing([name for name in absent if name not in lost])
    known = set(structure.parameters) | set(structure.buffers) | set(structure.model.state_dict())
    behind: list[str] = []
    for name in weights:
        place = structure.names.place(name)
        if place.is_part or place.name in known or name.endswith(_HARMLESS):
            continue
        if structure.is_beside(name) or DRAFT.search(name):
            continue
        if structure.is_draft_head(name):
            behind.append(name)
            continue
        if originals is not None and name in originals.names:
            continue
        findings.append(
            _finding("suspicious", "extra", name, "the model that config.json describes has no such weight")
        )
    if behind and not any(key in structure.text_config.to_dict() for key in _DRAFT_KEYS):
        says = f"is {structure.count}, and there are weights of further blocks ({behind[0]}): loaders drop them"
        findings.append(_finding("broken", "config", "config.json: num_hidden_layers", says))
    return findings


def _by_parts(opened: Opened, weights: Mapping[str, Sequence[str]]) -> list[Finding]:
    """A GGUF file against what its architecture has."""
    assert opened.header is not None
    a = describe(dict(opened.config))
    if a is None:
        return []
    form = FORMS[str(opened.header.metadata["general.architecture"])]
    needed = [name for part in parts(a, form, list(weights)) if not part.bias for name in part.names]
    return _missing([name for name in needed if name not in weights])


def _missing(names: Sequence[str]) -> list[Finding]:
    shown = [_finding("broken", "missing", name, "is missing") for name in names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        shown.append(_finding("broken", "missing", names[_MOST_NAMED], f"and {len(names) - _MOST_NAMED} are missing"))
    return shown


def _gaps(weights: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Experts whose numbers have gaps, and mixtures with fewer of one layer than of another."""
    findings = []
    places: dict[str, dict[str, set[int]]] = {}
    for (place, layer), of in experts(weights).items():
        places.setdefault(place, {})[layer] = set(of)
    for place, layers in places.items():
        every = set().union(*layers.values())
        every = set(range(max(every) + 1))
        for layer, numbers in layers.items():
            if gone := sorted(every - numbers):
                shown = ", ".join(map(str, gone[:8]))
                findings.append(_finding("broken", "experts", place, f"{layer} of expert {shown} is missing"))
    return findings


def check_shapes(
    opened: Opened,
    examined: Sequence[Examined],
    structure: ModelStructure | None,
    originals: Originals | None,
) -> list[Finding]:
    """Shapes against config.json's and, where those agree, the original's."""
    findings = []
    smaller: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for one in examined:
        name, shape = one.weight.name, one.weight.shape
        parameter = None if structure is None else structure.find(name)
        if parameter is not None and _bare(parameter.shape) != _bare(shape):
            says = f"has shape {list(shape)}, and config.json asks for {list(parameter.shape)}"
            findings.append(_finding("broken", "shape", name, says + _keys(opened, shape, parameter.shape)))
            continue
        if originals is None or one.original is not None or one.sight.bad or not originals.has(name):
            continue
        real = originals.get(name)
        if real is not None and _bare(tuple(real.shape)) != _bare(shape):
            smaller.append((name, shape, tuple(real.shape)))
    if smaller:
        name, shape, real_shape = smaller[0]
        both = f"{list(shape)}, in the original {list(real_shape)}"
        if structure is not None or opened.header is not None:
            says = f"{both}: narrower than the original by design (config.json agrees); not compared"
            level: Level = "note"
            if any(s > r for s, r in zip(shape, real_shape, strict=False)):
                level, says = "suspicious", f"{both}: another size than the original's, though config.json agrees"
            findings.append(_finding(level, "trained", f"{name} and {len(smaller) - 1} more", says))
        else:
            findings.append(_finding("broken", "shape", name, f"has shape {both}"))
    return findings


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _keys(opened: Opened, found: tuple[int, ...], asked: tuple[int, ...]) -> str:
    """Which keys of config.json say the size that is not there."""
    config = opened.text_config
    for ours, theirs in zip(found, asked, strict=False):
        if ours == theirs:
            continue
        keys = [key for key, value in config.items() if value == theirs and type(value) is int]
        heads = [key for key in ("num_attention_heads", "num_key_value_heads") if config.get(key)]
        for key in heads:
            if theirs % int(config[key]) == 0 and not keys:
                keys.append(f"{key} times a head's size")
        if keys:
            return f" ({' or '.join(keys[:2])} is {theirs})"
    return ""


def check_ties(opened: Opened, originals: Originals | None) -> list[Finding]:
    """Head and embedding: one tensor or two, as config.json says, as the original has them."""
    weights = by_weight(opened.tensors)
    embedding, head = find_embedding(weights), next((name for name in HEADS if name in weights), None)
    if opened.header is not None or embedding is None or not opened.config:
        return []
    said = opened.config.get("tie_word_embeddings", opened.text_config.get("tie_word_embeddings"))
    original_head = None if originals is None else next((name for name in HEADS if name in originals.names), None)
    equal = None if head is None else _equal(opened, embedding, head)
    if said and head is not None and equal is False:
        says = (
            "config.json ties the head to the embedding, and the file has a head that differs from it: loaders drop it"
        )
        return [_finding("broken", "tied", head, says)]
    if said is False and head is None:
        says = "config.json says that the head is a weight of its own, and there is none: loaders make a random one"
        return [_finding("broken", "tied", HEADS[0], says)]
    if originals is not None and original_head is not None and head is None and not _tied_there(originals):
        says = "the original has a head of its own, and here the embedding is in its place"
        return [_finding("broken", "tied", HEADS[0], says)]
    return []


def _tied_there(originals: Originals) -> bool:
    opened = originals.opened
    return bool(opened.config.get("tie_word_embeddings", opened.text_config.get("tie_word_embeddings")))


def _equal(opened: Opened, embedding: str, head: str) -> bool | None:
    """Whether both are the same but for rounding; None where one cannot be read."""
    with suppress(RuntimeFloorError):
        one, other = whole(read(opened, embedding)), whole(read(opened, head))
        if one.shape != other.shape:
            return False
        off = float((one - other).norm() / torch.linalg.vector_norm(one).clamp_min(1e-20))
        return off < 0.3
    return None


def check_draft_heads(opened: Opened, structure: ModelStructure | None, originals: Originals) -> list[Finding]:
    """Heads of the original that guess further tokens: carried or lost."""
    there = originals.opened
    layers = there.text_config.get("num_hidden_layers")
    heads = [name for name in originals.names if _is_draft_head(name, layers)]
    weights = by_weight(opened.tensors)
    findings = []
    if heads:
        kept = [name for name in heads if name in weights] if opened.header is None else _behind(opened)
        what = f"{len(heads)} weights of draft heads ({heads[0]} among them)"
        if not kept:
            says = f"{what} of the original are lost: nothing drafts with them"
            findings.append(_finding("suspicious", "draft heads", heads[0], says))
        elif opened.header is None and len(kept) < len(heads):
            gone = next(name for name in heads if name not in weights)
            says = f"of {what} of the original {len(heads) - len(kept)} are lost"
            findings.append(_finding("broken", "draft heads", gone, says))
        else:
            findings.append(_finding("note", "draft heads", heads[0], f"{what} are carried"))
    for name in _draft_files(there.path):
        if opened.path.is_dir() and name not in _draft_files(opened.path):
            says = "stands beside the original and not here: nothing drafts with it"
            findings.append(_finding("suspicious", "draft heads", name, says))
    return findings


def _is_draft_head(name: str, layers: Any) -> bool:
    match = re.search(r"\.layers\.(\d+)\.", f".{name}")
    return DRAFT.search(name) is not None or (match is not None and isinstance(layers, int) and int(match[1]) >= layers)


def _behind(opened: Opened) -> list[str]:
    assert opened.header is not None
    layers = int(opened.config.get("num_hidden_layers", 0))
    return [name for name in opened.header.tensors if name.startswith(f"blk.{layers}.")]


def _draft_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    found = {path.name for pattern in _DRAFT_FILES for path in folder.glob(pattern)}
    return sorted(name for name in found if name.endswith(".safetensors") or (folder / name).is_dir())
