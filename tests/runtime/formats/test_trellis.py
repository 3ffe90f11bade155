"""The trellis format: its specification's own decoder, files that come back, damaged ones, and transformers."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import formats, load
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.formats import trellis
from runtime.formats.packed import PackedWeight
from runtime.kernels.reference import packed_linear
from tests.runtime.formats.damage import Damage, changed, without

Packed = Callable[..., PackedWeight]
PAGE = Path(__file__).parents[3] / "docs" / "trellis.md"


def specified() -> Callable[..., float]:
    """The decoder that the specification prints."""
    found = re.search(r"```python\n(def weight.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    known: dict[str, Any] = {}
    exec(found.group(1), known)
    made: Callable[..., float] = known["weight"]
    return made


@pytest.mark.parametrize("bits", trellis.BITS)
def test_the_reader_reads_what_the_specification_says(packed: Packed, bits: int) -> None:
    n, k = 35, 21
    found, weight = packed("trellis", n, k, bits=bits), specified()
    assert found.tiles is not None
    tiles, levels, scale = found.tiles.sequences.tolist(), found.tiles.levels.tolist(), found.scale.tolist()
    wanted = [[weight(tiles, levels, scale, bits, i, j) for j in range(k)] for i in range(n)]
    assert torch.equal(formats.dequantize(found).double(), torch.tensor(wanted, dtype=torch.float64).float().double())


@pytest.mark.parametrize("bits", trellis.BITS)
def test_a_file_comes_back(packed: Packed, bits: int) -> None:
    made = packed("trellis", 33, 50, bits=bits, bias=True)
    made = replace(
        made, scale=made.scale.bfloat16().float(), bias=None if made.bias is None else made.bias.bfloat16().float()
    )
    stored = formats.to_tensors(made, "layer", torch.bfloat16)
    back = formats.read(formats.hf_config({"layer": made.scheme}), stored, "layer")
    assert isinstance(back, PackedWeight) and back.tiles is not None and made.tiles is not None
    assert back.scheme == made.scheme and torch.equal(back.codes, made.codes) and torch.equal(back.scale, made.scale)
    assert made.bias is not None and back.bias is not None and torch.equal(back.bias, made.bias)
    assert torch.equal(back.tiles.sequences, made.tiles.sequences) and torch.equal(back.tiles.levels, made.tiles.levels)


def test_it_is_exactly_an_int8_layer(packed: Packed) -> None:
    made, x = packed("trellis", 40, 70, bits=2), torch.randn(5, 70)
    as_rows = trellis.as_int8(made)
    assert torch.equal(formats.dequantize(made), formats.dequantize(as_rows))
    assert torch.equal(packed_linear(made)(x), packed_linear(as_rows)(x))
    with pytest.raises(ValueError, match="only a trellis has levels of int8, found int8"):
        trellis.as_int8(as_rows)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (without("layer.weight_levels"), "tensor layer.weight_levels is missing"),
        (without("layer.weight_shape"), "tensor layer.weight_shape is missing"),
        (changed("layer.weight_tiles", lambda t: t[1:]), "tensor layer.weight_tiles has shape"),
        (changed("layer.weight_tiles", lambda t: t[..., :50]), "tensor layer.weight_tiles must be"),
        (changed("layer.weight_tiles", Tensor.float), "tensor layer.weight_tiles must be uint8"),
        (changed("layer.weight_levels", lambda t: torch.full_like(t, -128)), "tensor layer.weight_levels must lie in"),
        (changed("layer.weight_scale", lambda t: t / 0), "tensor layer.weight_scale must be finite"),
        (changed("layer.weight_shape", lambda t: -t), "tensor layer.weight_tiles must be"),
        (changed("layer.weight_shape", lambda t: t + 100), "tensor layer.weight_tiles has shape"),
    ],
)
def test_a_damaged_file_is_one_sentence(packed: Packed, damage: Damage, told: str) -> None:
    made = packed("trellis", 33, 50, bits=3)
    tensors = formats.to_tensors(replace(made, scale=made.scale.bfloat16().float()), "layer", torch.bfloat16)
    damage(tensors)
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        formats.read(formats.hf_config({"layer": made.scheme}), tensors, "layer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"version": None}, {"bits": None}, {"bits": {"a": 5}}, {"bits": [3]}]
)
def test_another_configuration_is_refused(change: dict[str, Any]) -> None:
    config = formats.hf_config({"layer": trellis.scheme(3)}) | change
    with pytest.raises(UserError, match=r"config\.json: quantization_config\.(version|bits)"):
        formats.check_supported(config)


def test_what_is_no_trellis_is_not_written(packed: Packed) -> None:
    made = packed("trellis", 16, 16)
    for wrong, told in (
        (replace(made, tiles=None), "a trellis is written of sequences"),
        (replace(made, codes=-made.codes), "the codes are others than the sequences say"),
    ):
        with pytest.raises(ValueError, match=told):
            trellis.to_tensors(wrong, "layer")
    with pytest.raises(ValueError, match="bits must be one of 2, 3, 4, found 5"):
        trellis.scheme(5)
    with pytest.raises(ValueError, match="trellis has one scale per output row"):
        trellis.pack(torch.randn(16, 16), 32)


def test_a_model_of_several_libraries_is_refused() -> None:
    with pytest.raises(ValueError, match="one checkpoint has one library"):
        formats.hf_config({"a": trellis.scheme(3), "b": formats.KINDS["int8"].format.scheme()})


def test_transformers_loads_the_same_codes(tiny_packed: Callable[..., Path]) -> None:
    import transformers

    import runtime.formats.transformers as registered

    path = tiny_packed("trellis")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours = load(path, kernels="reference")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == trellis.METHOD and set(config["bits"].values()) == {3}
    for name in config["bits"]:
        layer = theirs.get_submodule(name)
        assert isinstance(layer, registered.TrellisLinear)
        weight = formats.read(config, {f"{name}.{key}": value for key, value in layer.state_dict().items()}, name)
        assert isinstance(weight, PackedWeight) and torch.equal(layer.weight, formats.dequantize(weight))
    tokens = torch.arange(1, 20)
    cache = ours.decoder.new_cache()
    rows = Rows.chains([(cache.open(64), 0, len(tokens))])
    found = ours.decoder.forward(tokens, rows, cache).logits
    wanted = theirs(tokens.unsqueeze(0)).logits[0]
    # Activations are rounded to int8 here and not there.
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_a_layer_that_transformers_does_not_have_is_named(tiny_packed: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    import transformers

    import runtime.formats.transformers  # noqa: F401

    path = tmp_path / "model"
    shutil.copytree(tiny_packed("trellis"), path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["bits"] = {"model.nowhere": 3}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape("quantization_config.bits names model.nowhere, which")):
        transformers.AutoModelForCausalLM.from_pretrained(path)
