"""Export "bitnet": transformers' two-bit ternary layout, which llama.cpp's converter reads too."""

from pathlib import Path

from torch import Tensor

from compress.errors import UserError
from compress.export import Exported, Progress, directory
from compress.export.directory import Form
from compress.export.layers import NOTHING_PACKED, Facts, survey
from runtime.formats import ternary
from runtime.formats.packed import PackedWeight


def refusal(kinds: frozenset[str]) -> str | None:
    """Why models with layers of these kinds cannot be exported; None where they can."""
    if not kinds:
        return NOTHING_PACKED
    others = sorted(kinds - {"ternary"})
    if others:
        return (
            f"bitnet holds ternary weights, found {', '.join(others)}, which rounding to three values would ruin:"
            " compress with a recipe that trains ternary weights"
        )
    return None


def write(model: Path, out: Path, progress: Progress) -> Exported:
    """See compress.export."""
    found = survey(model)
    if (why := refusal(frozenset(layer.scheme.kind for layer in found.packed))) is not None:
        raise UserError(f"export bitnet: {why}")
    if found.method == "bitnet":
        return directory.copy("bitnet", found, out, progress)

    def store(layer: Facts, weight: PackedWeight) -> dict[str, Tensor]:
        return ternary.to_tensors(weight, layer.prefix, found.dtype)

    return directory.write("bitnet", found, Form(ternary.hf_config(found.skipped), store), out, progress)
