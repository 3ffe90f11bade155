"""The table of schemes against the formats themselves: descriptions, sizes and layouts."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from runtime import formats
from runtime.formats.schemes import SCHEMES, named, stored_bytes
from runtime.formats.tensors import tensor_bytes


class Counted(dict[str, torch.Tensor]):
    """Tensors, and how often each was read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reads: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_row_says_what_its_format_packs_and_how_large_that_is(name: str, symmetric: bool) -> None:
    row = named(name)
    if not symmetric and not row.is_grid:
        with pytest.raises(ValueError, match=f"scheme '{name}' has no zero points"):
            row.scheme(symmetric=False)
        return
    scheme = row.scheme(symmetric=symmetric)
    options = {"bits": row.bits, "symmetric": symmetric} if row.is_grid else {}
    options |= {"bits": row.bits} if row.codes.has_tiles else {}
    options |= {"input_scale": 0.5} if row.is_static else {}
    packed = row.codes.format.pack(torch.randn(64, 256), scheme.group_size, **options)
    assert packed.scheme == scheme
    tensors = formats.to_tensors(packed, "layer", torch.bfloat16)
    described = {key for key in tensors if key.endswith(("bitsandbytes__nf4", "input_scale"))}
    expected = tensor_bytes({key: value for key, value in tensors.items() if key not in described})
    assert stored_bytes(scheme, 64, 256) == expected
    checkpoint = Counted(tensors)
    back = formats.read(formats.hf_config({"layer": scheme}), checkpoint, "layer")
    assert not isinstance(back, torch.Tensor) and torch.equal(back.codes.float(), packed.codes.float())
    # A checkpoint reads a tensor anew each time.
    assert checkpoint.reads and set(checkpoint.reads.values()) == {1}


def test_codes_lie_in_their_ranges() -> None:
    for kind in {row.codes for row in SCHEMES.values()}:
        packed = kind.format.pack(torch.randn(16, 256))
        low, high = (int(v) for v in torch.aminmax(packed.codes.float()))
        assert kind.ranges[0][0] <= low and high <= kind.ranges[0][1]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="scheme 'int7' is unknown: expected one of int8-dynamic, "):
        named("int7")


def test_the_table_needs_no_torch() -> None:
    code = "import sys, runtime.formats.schemes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
