"""Fused experts read as single layers: the same numbers, an expert at a time."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from compress.model.single_experts import SingleExperts
from runtime.checkpoints.safetensors import Shards


def test_each_layer_of_each_expert_is_its_part_of_the_fused_tensor(tmp_path: Path) -> None:
    count, hidden, inner = 3, 10, 7
    at = "model.layers.1.feed_forward"
    gate_up, down = torch.randn(count, hidden, 2 * inner), torch.randn(count, inner, hidden)
    tensors = {f"{at}.experts.gate_up_proj": gate_up, f"{at}.experts.down_proj": down}
    save_file(tensors | {f"{at}.router.weight": torch.randn(count, hidden)}, tmp_path / "model.safetensors")
    shards = SingleExperts(Shards(tmp_path))
    assert len(shards) == len(list(shards)) == 3 * count + 1 and f"{at}.experts.gate_up_proj" not in shards
    x = torch.randn(5, hidden)
    for number in range(count):
        gate, up, out = (shards[f"{at}.experts.{number}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        assert shards.entry(f"{at}.experts.{number}.up_proj.weight").shape == up.shape == (inner, hidden)
        assert torch.equal(torch.cat([gate, up]), gate_up[number].T) and torch.equal(out, down[number].T)
        ours = (x @ gate.T * (x @ up.T)) @ out.T
        first, second = (x @ gate_up[number]).chunk(2, dim=-1)
        assert torch.allclose(ours, (first * second) @ down[number], rtol=1e-5, atol=1e-5)
    assert shards[f"{at}.router.weight"].shape == (count, hidden)
