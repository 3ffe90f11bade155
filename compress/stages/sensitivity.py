"""How much each layer's rounding damages the model, and which bits each layer therefore gets.

Damage is measured one layer at a time: the layer is rounded, everything else stays, and KL(original ‖ changed) of the
model's output is averaged over calibration text. Damages of different layers are taken to add up, as HAWQ-V3 (Yao et
al., 2021) and many others do; the sum is a ranking, no forecast.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.logits import kl_rows, log_probabilities
from compress.model.plan import Plan
from compress.model.structure import ModelStructure
from compress.progress import Progress
from compress.quantize.grid import Grid, decode, encode, fit
from compress.quantize.knapsack import choose
from compress.recipe.block_stages import Quantize
from runtime.formats.schemes import Scheme, stored_bytes

# Logits of one forward, 256 MB of float32, and rows of them that are compared in float64 at a time.
_LOGITS = 1 << 26
_ROWS = 256
# A few thousand tokens rank layers; more change nothing but the time.
_TOKENS = 4096
_SCHEMES = {3: "int3", 4: "int4"}
# What engines compute in one product must have one scheme.
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Candidate:
    """What a layer may become: symmetric integers of `bits`; `group_size` inputs share a scale, 0: a whole row."""

    bits: int
    group_size: int

    @property
    def stored_as(self) -> Scheme:
        """int8 rows, or words of so many bits."""
        kind = "int8" if (self.bits, self.group_size) == (8, 0) else "int4"
        return Scheme(kind, self.bits, self.group_size, True, "float")


@dataclass(frozen=True)
class Unit:
    """Layers that change together. damage[c] and stored_bits[c] are those of candidate c, stored_bits with scales."""

    name: str
    layers: tuple[str, ...]
    weights: int
    damage: tuple[float, ...]
    stored_bits: tuple[int, ...]


@dataclass(frozen=True)
class Sensitivity:
    """The damage of every unit by every candidate; `tokens` predicted to measure it."""

    candidates: tuple[Candidate, ...]
    units: tuple[Unit, ...]
    tokens: int


def nearest(weight: Tensor, candidate: Candidate) -> tuple[Tensor, int]:
    """A weight (N, K) rounded to nearest as it would be read back, float32, and its bytes in the file.

    Scales are bfloat16. Raises ValueError where the groups do not divide a row.
    """
    grid = Grid(candidate.bits, candidate.group_size)
    scale, zero = fit(weight, grid, torch.bfloat16)
    rounded = decode(encode(weight, scale, zero, grid), scale, zero, grid)
    return rounded, stored_bytes(candidate.stored_as, *weight.shape)


def fused_units(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Layers that engines fuse, together: q, k and v; gate and up; all experts, whose loader has one scheme for all."""
    out: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if re.search(r"\.experts\.\d+\.", name):
            unit = "experts"
        else:
            unit = f"{parent}.{_TOGETHER[leaf]}" if leaf in _TOGETHER else name
        out.setdefault(unit, []).append(name)
    return {unit: tuple(layers) for unit, layers in out.items()}


@torch.inference_mode()
def measure(
    model: Any,
    windows: Tensor,
    units: Mapping[str, Sequence[str]],
    candidates: Sequence[Candidate],
    blocks_at: str,
    progress: Progress | None = None,
) -> Sensitivity:
    """Rounds one unit at a time to each candidate and measures what that does to the model's output.

    model      a transformers causal LM in float32, in eval mode; it is the same afterwards.
    windows    (S, T) int64 calibration tokens: a few thousand tokens rank layers.
    units      name → the names of its nn.Linear modules (`fused_units`).
    blocks_at  the module that holds the decoder layers ("model.layers", as ModelStructure has it). A forward begins at
               the unit's block: what comes before it is replayed.
    progress   told ("sensitivity", forwards done, forwards).

    Raises UserError where the output is not finite (unit and candidate named).
    """
    blocks = list(model.get_submodule(blocks_at))
    layers = {name: model.get_submodule(name) for names in units.values() for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name}: expected an nn.Linear, found {type(layer).__name__}")
    # The first block that any of the unit's layers is in; 0 for layers outside of the blocks.
    place = re.compile(rf"{re.escape(blocks_at)}\.(\d+)\.")
    firsts = {u: min(int(at[1]) if (at := place.match(name)) else 0 for name in names) for u, names in units.items()}
    rows = max(1, _LOGITS // (int(model.config.vocab_size) * windows.shape[1]))
    batches = windows.split(rows)
    damage = torch.zeros(len(units), len(candidates), dtype=torch.float64)
    stored = torch.zeros(len(units), len(candidates), dtype=torch.int64)
    done, total = 0, len(batches) * damage.numel()
    for batch in batches:
        outputs, reference = recorded(model, blocks, batch)
        for u, (unit, names) in enumerate(units.items()):
            for c, candidate in enumerate(candidates):
                with _rounded({name: layers[name] for name in names}, candidate) as size:
                    with replayed(blocks[: firsts[unit]], outputs):
                        logits = model(batch, use_cache=False).logits.flatten(0, 1)
                    found = divergence(reference, logits)
                    if not torch.isfinite(found):
                        raise UserError(
                            f"{unit}: expected finite logits after rounding it to {candidate.bits} bits, found "
                            f"{float(found)}: check the weights for NaN or infinity"
                        )
                    damage[u, c] += found
                    stored[u, c] = 8 * size[0]
                done += 1
                if progress is not None:
                    progress("sensitivity", done, total)
    damage /= windows.numel()
    found_units = tuple(
        Unit(
            unit,
            tuple(names),
            sum(layers[name].weight.numel() for name in names),
            tuple(map(float, damage[u])),
            tuple(map(int, stored[u])),
        )
        for u, (unit, names) in enumerate(units.items())
    )
    return Sensitivity(tuple(candidates), found_units, windows.numel())


def allocate(found: Sensitivity, bits_per_weight: float) -> dict[str, Candidate]:
    """The candidate of every layer, by layer's name: the least damage within so many stored bits a weight.

    Scales count. Raises UserError where the budget is below what the candidates can reach.
    """
    sizes = [unit.stored_bits for unit in found.units]
    weights = sum(unit.weights for unit in found.units)
    least = sum(map(min, sizes)) / weights
    if least > bits_per_weight:
        raise UserError(
            f"bits_per_weight: expected at least {least:.3f}, which the smallest candidates take, found "
            f"{bits_per_weight:g}: raise the budget or allow fewer bits"
        )
    picks = choose([unit.damage for unit in found.units], sizes, bits_per_weight * weights)
    pairs = zip(found.units, picks, strict=True)
    return {layer: found.candidates[pick] for unit, pick in pairs for layer in unit.layers}


@dataclass(frozen=True)
class Output:
    """What a block puts out, and by argument what it leaves for later ones (Gemma 4: keys and values)."""

    out: Any
    left: Mapping[str, Mapping[Any, Any]]


def recorded(model: Any, blocks: Sequence[nn.Module], tokens: Tensor) -> tuple[list[Output], Tensor]:
    """Every block's output, and the logits (rows, vocabulary)."""
    outputs: list[Output] = []

    def seen(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        left = {name: dict(value) for name, value in named.items() if isinstance(value, MutableMapping)}
        outputs.append(Output(out, left))

    hooks = [block.register_forward_hook(seen, with_kwargs=True) for block in blocks]
    try:
        logits = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, logits.flatten(0, 1)


@contextmanager
def replayed(blocks: Sequence[nn.Module], outputs: Sequence[Output]) -> Iterator[None]:
    """Lets blocks put out what they did before, without computing. Everything else about them stays in sight."""

    def again(output: Output) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            for name, left in output.left.items():
                named[name].update(left)
            return output.out

        return forward

    for block, output in zip(blocks, outputs, strict=False):
        block.forward = again(output)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def _rounded(layers: Mapping[str, nn.Linear], candidate: Candidate) -> Iterator[list[int]]:
    """The layers rounded, and put back afterwards; yields the bytes that they would take."""
    before = {name: layer.weight for name, layer in layers.items()}
    size = [0]
    try:
        for name, layer in layers.items():
            weight, taken = nearest(before[name].detach(), candidate)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            size[0] += taken
        yield size
    finally:
        for name, layer in layers.items():
            layer.weight = before[name]


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """The sum over rows of KL(reference ‖ logits), nats, float64."""
    total = torch.zeros((), dtype=torch.float64)
    for p, q in zip(reference.split(_ROWS), logits.split(_ROWS), strict=True):
        total += kl_rows(log_probabilities(p), log_probabilities(q)).sum()
    return total


def choose_schemes(
    folder: Path, plan: Plan, model: ModelStructure, stage: Quantize, windows: Tensor, progress: Progress
) -> Plan:
    """The plan with the scheme for each layer that costs the model's output the least within `stage.bits_per_weight`.

    folder   the model's directory, of safetensors.
    plan     of int4 layers with the group sizes that divide their rows. Candidates are 3 and 4 bits with these, and 8
             bits per row.
    windows  (S, T) int64 calibration tokens, of which the first few thousand are looked at.

    Raises UserError for a budget that nothing fits, fused experts, and a model that transformers cannot load.
    """
    from transformers import AutoModelForCausalLM

    if any(".experts." in layer.module for layer in plan.layers.values()):
        raise UserError("quantize.method: sensitivity does not take experts apart yet: leave them out with ignore")
    assert stage.bits_per_weight is not None
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    names = [layer.module for layer in plan.layers.values()]
    by_group: dict[int, list[str]] = {}
    for layer in plan.layers.values():
        by_group.setdefault(layer.group_size, []).append(layer.module)
    group = max(by_group, key=lambda size: len(by_group[size]))
    fitting = [name for name in names if name in by_group[group]]
    candidates = (Candidate(3, group), Candidate(4, group), Candidate(8, 0))
    count = max(1, _TOKENS // windows.shape[1])
    found = measure(loaded, windows[:count], fused_units(fitting), candidates, model.blocks_at, progress=progress)
    chosen = allocate(found, bits_per_weight=stage.bits_per_weight)
    schemes = {name: (_SCHEMES.get(one.bits, "int8-dynamic"), one.group_size) for name, one in chosen.items()}
    return plan.with_schemes(schemes)
