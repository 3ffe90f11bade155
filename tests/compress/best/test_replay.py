"""Forwards over again from a block on give the bits of whole ones."""

import pytest
import torch

from compress.best.replay import recorded, replayed
from runtime.models.tiny import tiny_model
from tests.compress.tiny_architectures import gemma4


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_a_replayed_model_gives_the_same_bits(kind: str) -> None:
    """Gemma 4's blocks hand keys and values on to later ones besides what they put out."""
    model = (gemma4() if kind == "gemma4_text" else tiny_model(kind)).float().eval()
    blocks = list(model.get_decoder().layers)
    tokens = torch.randint(1, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        outputs, logits = recorded(model, blocks, tokens)
        assert len(outputs) == len(blocks) and torch.isfinite(logits).all()
        for count in range(len(blocks) + 1):
            with replayed(blocks[:count], outputs):
                assert torch.equal(model(tokens, use_cache=False).logits.flatten(0, 1), logits)
        # What is replayed is not computed: other weights in there change nothing, behind it they do.
        for block, same in ((blocks[0], True), (blocks[-1], False)):
            for parameter in block.parameters():
                parameter.mul_(1.5)
            with replayed(blocks[:-1], outputs):
                assert torch.equal(model(tokens, use_cache=False).logits.flatten(0, 1), logits) == same
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
