"""Every family in the table on Triton's kernels: near the reference, the same bits at other widths, or refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.contract import Decoder, Rows
from runtime.errors import UserError
from runtime.kernels import dispatch
from runtime.model.base import BaseDecoder
from runtime.model.layers import described
from tests.runtime.model.families import FAMILIES, VOCABULARY, WINDOW, write
from tests.slices import often

# What Triton's attention has not.
REFUSED = {
    **dict.fromkeys(("gemma2", "vaultgemma"), "attn_logit_softcapping"),
    "gemma4_text": "keys of several shapes",
    "gpt_oss": "sinks",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "latent"),
}


def run(decoder: Decoder, tokens: Tensor, width: int) -> Tensor:
    assert isinstance(decoder, BaseDecoder)
    cache = decoder.new_cache()
    request, found = cache.open(len(tokens)), []
    for start in range(0, len(tokens), width):
        piece = tokens[start : start + width]
        found.append(decoder.forward(piece, Rows.chains([(request, start, len(piece))]), cache).logits)
    return torch.cat(found)


@pytest.mark.parametrize("kind", often([kind for kind in FAMILIES if kind not in REFUSED], "cohere2"))
def test_a_family(tmp_path: Path, device: str, kind: str) -> None:
    """1e-5 of the logits' norm, as for the first families."""
    path = write(kind, tmp_path / kind)
    tokens = torch.randint(1, VOCABULARY, (WINDOW + 3 if device == "cuda" else 7,), generator=torch.manual_seed(1))
    decoder = load(path, device=device, kernels="triton").decoder
    whole = run(decoder, tokens, len(tokens))
    want = run(load(path, kernels="reference").decoder, tokens, len(tokens))
    assert float((whole.cpu() - want).norm() / want.norm()) < 1e-5
    assert torch.equal(run(decoder, tokens, 4), whole)


@pytest.mark.parametrize(("kind", "lacking"), REFUSED.items())
def test_what_the_kernels_have_not_is_refused(tmp_path: Path, device: str, kind: str, lacking: str) -> None:
    path = write(kind, tmp_path / kind)
    with pytest.raises(UserError, match=lacking):
        load(path, device=device, kernels="triton")


@pytest.mark.parametrize("kind", often(list(REFUSED), "gpt_oss"))
def test_auto_takes_plain_torch_for_them_and_says_so(
    tmp_path: Path, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Triton is the first choice, as on a GPU."""
    there = {one.name: one for one in dispatch.available(device)}
    monkeypatch.setattr(dispatch, "available", lambda *_: [there["triton"], there["plain-torch"]])
    assert load(write("cohere2", tmp_path / "cohere2"), device=device).decoder.kernels == "triton"
    path = write(kind, tmp_path / kind)
    decoder = load(path, device=device).decoder
    assert decoder.kernels == "plain-torch" and f"triton has no {REFUSED[kind]}" in described(decoder)
    tokens = torch.randint(1, VOCABULARY, (7,), generator=torch.manual_seed(1))
    monkeypatch.undo()
    want = run(load(path, kernels="reference").decoder, tokens, 7)
    assert float((run(decoder, tokens, 4).cpu() - want).norm() / want.norm()) < 1e-5
