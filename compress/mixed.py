"""Bits by sensitivity: what each layer of a model gets, measured on the model as a whole before any block is worked on.

The model is loaded into memory in float32 for that: it is the one step of the pipeline that does not stream.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from compress.errors import UserError
from compress.plan import Plan
from compress.recipe_stages import Quantize
from compress.sensitivity import Candidate, allocate, fused_units, measure
from compress.survey import Survey

if TYPE_CHECKING:
    from torch import Tensor

# A few thousand tokens rank layers; more change nothing but the time.
_TOKENS = 4096
_SCHEMES = {3: "int3", 4: "int4"}


def choose_schemes(
    folder: Path,
    plan: Plan,
    model: Survey,
    stage: Quantize,
    windows: "Tensor",
    progress: Callable[[str, int, int], None],
) -> Plan:
    """The plan with the scheme for each layer that costs the model's output the least within `stage.bits_per_weight`.

    folder   the model's directory, of safetensors.
    plan     of int4 layers with the group sizes that divide their rows. Candidates are 3 and 4 bits with these, and 8
             bits per row.
    windows  (S, T) int64 calibration tokens, of which the first few thousand are looked at.

    Raises UserError for a budget that nothing fits, fused experts, and a model that transformers cannot load.
    """
    import torch
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
    return plan.with_schemes({name: _scheme(candidate) for name, candidate in chosen.items()})


def _scheme(candidate: Candidate) -> tuple[str, int]:
    """As plan.Layer has it."""
    return _SCHEMES.get(candidate.bits, "int8-dynamic"), candidate.group_size
