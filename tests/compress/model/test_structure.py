"""transformers' decoder layers, filled one at a time, compute what the whole model does, and write what they read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calib.moments import Wants
from compress.calibration.activations import Activations, Inputs
from compress.calibration.capture import Capture
from compress.calibration.carried import Call
from compress.calibration.statistics import collect
from compress.errors import UserError
from compress.model.block import Block
from compress.model.block_loader import BlockLoader
from compress.model.structure import read_structure
from compress.recipe.block_stages import Experts
from runtime.checkpoints.open import open_checkpoint
from tests.compress.tiny_architectures import gemma4, make

Tiny = Callable[..., Path]
KINDS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "gpt2")
# Layers that give tuples, and tensors that have other names or are parts of parameters.
OTHERS = ("gemma3", "gemma4_text", "bloom", "falcon", "gpt_neox", "granitemoe", "phimoe", "kimi_linear")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of two kinds, which the model calls with other masks and position embeddings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "gemma3_text",
        **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 128},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    path: Path = tmp_path_factory.mktemp("gemma3") / "gemma3"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def place(tiny: Tiny, gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small model of a kind."""
    made: dict[str, Path] = {"gemma3": gemma3}

    def get(kind: str) -> Path:
        if kind in KINDS:
            return tiny(kind)
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / kind
            # Embeddings that are scaled round in bfloat16, which the blocks' inputs then have.
            gemma4().save_pretrained(made[kind]) if kind == "gemma4_text" else make(kind, made[kind])
        return made[kind]

    return get


def tokens() -> Tensor:
    return torch.randint(1, 320, (3, 24), generator=torch.Generator().manual_seed(5))


def opened(path: Path) -> BlockLoader:
    return BlockLoader(open_checkpoint(path), read_structure(path))


def names_of(loader: BlockLoader, number: int | None) -> list[str]:
    return [name for name in loader.checkpoint.names() if loader.structure.block(name) == number]


def captured(loader: BlockLoader) -> tuple[Activations, list[Call]]:
    capture = Capture(loader, names_of(loader, None))
    rows = list(capture.inputs(tokens()))
    capture.release()
    return Activations(0, torch.cat([window for _, window in rows]).numpy(), rows[0][0]), capture.calls


@contextmanager
def heard(model: Any, layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """What each layer of a whole model gives."""
    out: list[Tensor] = []

    def hear(module: nn.Module, given: Any, result: Any) -> None:
        out.append(result[0] if isinstance(result, tuple) else result)

    handles = [layer.register_forward_hook(hear) for layer in layers]
    yield out
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_blocks_one_by_one_are_the_model(place: Callable[[str], Path], kind: str) -> None:
    from transformers import AutoModelForCausalLM

    path = place(kind)
    loader = opened(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    layers = list(model.get_submodule(loader.structure.blocks_at))
    with torch.no_grad(), heard(model, layers) as expected:
        model(tokens(), use_cache=False)
    activations, calls = captured(loader)
    assert len(calls) == len(layers)
    for number in range(len(layers)):
        block = loader.load(number, names_of(loader, number))
        assert not any(p.is_meta for p in block.module.parameters())
        inputs = Inputs(activations, calls[number])
        found = torch.cat(list(inputs.outputs(block)))
        torch.testing.assert_close(found, expected[number], rtol=1e-4, atol=1e-4)
        rows = list(inputs.following(block))
        activations = Activations(number + 1, torch.cat([window for _, window in rows]).numpy(), rows[0][0])


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_what_is_read_is_written(place: Callable[[str], Path], kind: str) -> None:
    loader = opened(place(kind))
    number = 0 if kind == "kimi_linear" else 1  # whose convolutions are three tensors
    names = names_of(loader, number)
    block = loader.load(number, names)
    stored, records = loader.stored(block, names)
    assert set(stored) == set(names) and records == []
    for name in names:
        assert torch.equal(stored[name], loader.checkpoint.tensor(name)), name
        assert stored[name].dtype == loader.checkpoint.tensor(name).dtype
    counts = {"phi3": 4, "gpt2": 4, "bloom": 4, "falcon": 4, "gpt_neox": 4, "kimi_linear": 9 + 3}
    counts |= dict.fromkeys(("mixtral", "granitemoe", "phimoe"), 4 + 3 * 4)
    # Values that are keys, and two layers for the block's own input.
    counts["gemma4_text"] = 6 + 2 + 3 * 4
    assert len(block.linears) == counts.get(kind, 7)
    assert set(block.linears) == set(block.names) == set(block.dtypes)
    bare = loader.meta_block(number, names)
    assert bare.names == block.names
    assert all(linear.weight.is_meta for linear in bare.linears.values())


def test_paths_and_names(tiny: Tiny) -> None:
    loader = opened(tiny("mixtral"))
    block = loader.meta_block(1, names_of(loader, 1))
    assert block.prefix == "model.layers.1"
    assert block.names["mlp.experts.2.gate_proj"] == "model.layers.1.block_sparse_moe.experts.2.w1"
    assert block.names["self_attn.q_proj"] == "model.layers.1.self_attn.q_proj"
    assert not any("gate" in path.split(".")[-1] and "experts" not in path for path in block.linears)


def test_16_bit_blocks_go_on_with_what_they_will_be_read_back_with(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny("llama")
    copy = tmp_path / "half"
    copy.mkdir()
    (copy / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    loader = opened(copy)
    names = names_of(loader, 0)
    block = loader.load(0, names)
    linear = block.linears["mlp.up_proj"]
    with torch.no_grad():
        linear.weight.mul_(1.001)
    exact = linear.weight.clone()
    stored, _ = loader.stored(block, names)
    assert not torch.equal(exact, linear.weight)
    assert torch.equal(linear.weight, stored["model.layers.0.mlp.up_proj.weight"].float())
    with torch.no_grad():
        linear.weight.mul_(1e38).mul_(1e38)
    with pytest.raises(UserError, match=r"up_proj\.weight: expected finite numbers.*bfloat16"):
        loader.stored(block, names)


def test_layers_that_no_text_reaches_are_starved(place: Callable[[str], Path]) -> None:
    """A decoder alone attends to no encoder."""
    loader = opened(place("bart"))
    activations, calls = captured(loader)
    block = loader.load(0, names_of(loader, 0))
    wants = dict.fromkeys(block.linears, Wants(hessian=True))
    found = collect(block, Inputs(activations, calls[0]), wants, Experts())
    assert block.starved == {path for path in block.linears if path.startswith("encoder_attn.")}
    assert block.starved and found.keys() == wants.keys() - block.starved


def test_layers_that_see_the_text_are_refused(tiny: Tiny) -> None:
    loader = opened(tiny("llama"))
    capture = Capture(loader, names_of(loader, None))
    body: Any = loader.structure.model.base_model
    forward, calls = body.forward, []

    def telling(input_ids: Tensor, **rest: Any) -> Any:
        calls.append(1)
        # As architectures with token types or embeddings per layer do.
        return forward(input_ids=input_ids, position_ids=input_ids, **rest)

    body.forward = telling
    with pytest.raises(UserError, match="arguments that differ between texts"):
        list(capture.inputs(tokens()))
    assert len(calls) == 2


def test_weights_are_dropped_after_the_capture_and_blocks_with_their_last_name(tiny: Tiny) -> None:
    import weakref

    loader = opened(tiny("llama"))
    _, calls = captured(loader)
    assert all(p.is_meta for p in loader.structure.model.parameters())
    assert "forward" not in loader.structure.layers[0].__dict__ and len(calls) == 2
    block = loader.load(0, names_of(loader, 0))
    gone = weakref.ref(block.linears["mlp.up_proj"].weight)
    assert gone() is not None
    del block
    assert gone() is None


def test_shared_modules_are_seen(tiny: Tiny) -> None:
    from compress.model.plan import check_shared
    from compress.model.structure import _shared

    found = read_structure(tiny("llama"))
    check_shared(found)  # the tied head is outside the blocks
    one, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    shared = replace(found, tied={other: one})
    with pytest.raises(UserError, match=f"tensor {one} is shared with {other}"):
        check_shared(shared)
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": linear, "b": linear})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert _shared(parameters) == {"b.weight": "a.weight", "b.bias": "a.bias"}


def test_a_block_takes_only_what_it_stands_for(tiny: Tiny) -> None:
    from dataclasses import replace

    from compress.quantize import rtn

    loader = opened(tiny("llama"))
    block: Block = loader.load(0, names_of(loader, 0))
    before = block.linears["mlp.down_proj"].weight.clone()
    packed = rtn.quantize(before, "int4", 64)
    wrong = replace(packed, scale=packed.scale * float("nan"))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj: .*not finite"):
        block.pack("mlp.down_proj", wrong, "int4")
    block.pack("mlp.down_proj", packed, "int4", output_error=0.25, damping=0.01)
    after = block.linears["mlp.down_proj"].weight
    record = block.records[0]
    assert record.error == pytest.approx(float((before - after).norm() / before.norm()), rel=1e-5)
    assert (record.output_error, record.damping, record.group_size) == (0.25, 0.01, 64)
    stored, records = loader.stored(block, names_of(loader, 0))
    assert "model.layers.0.mlp.down_proj.weight" not in stored
    made = [t for name, t in stored.items() if name.startswith("model.layers.0.mlp.down_proj.")]
    assert records[0].stored_bytes == sum(t.nbytes for t in made) > 0


def test_activation_order_is_undone(tiny: Tiny) -> None:
    from dataclasses import replace

    from compress.quantize import rtn

    loader = opened(tiny("llama"))
    block = loader.load(0, names_of(loader, 0))
    weight = block.linears["mlp.down_proj"].weight.clone()
    perm = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
    packed = replace(rtn.quantize(weight[:, perm], "int4", 64), perm=perm)
    block.pack("mlp.down_proj", packed, "int4")
    assert block.records[0].error < 0.12
