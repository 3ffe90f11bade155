"""The decoder against transformers, and its promise: a row's bits do not depend on what shares the forward.

On the reference and on the kernels that `auto` takes; every native path has test_native.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load, native
from runtime.contract import Rows
from runtime.kernels.dispatch import choose

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
Whole = Callable[..., Tensor]
FAMILY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")


@pytest.fixture(scope="module", params=["reference", "plain-torch", *native.PATHS])
def kernels(request: pytest.FixtureRequest) -> str:
    """All that plain torch runs, and what `auto` takes here."""
    name = str(request.param)
    if name in native.PATHS and name != choose("auto", "cpu").name:
        pytest.skip("not what auto takes here")
    return name


def transformers_logits(path: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(tokens.view(1, -1)).logits[0].float()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", [*FAMILY, "gpt2"])
def test_forward_equals_transformers(tiny: Tiny, text: Text, whole: Whole, kernels: str, kind: str) -> None:
    tokens = text(90)
    model = load(tiny(kind), kernels=kernels)
    assert model.decoder.exact == (kind != "gpt2")
    assert model.decoder.kernels == ("transformers" if kind == "gpt2" else kernels)
    assert relative(whole(model.decoder, tokens), transformers_logits(tiny(kind), tokens)) < 1e-4


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    ],
)
def test_rotary_scaling_equals_transformers(tiny: Tiny, text: Text, whole: Whole, kernels: str, rope: dict) -> None:
    path, tokens = tiny("llama", rope_parameters=rope), text(150)
    assert relative(whole(load(path, kernels=kernels).decoder, tokens), transformers_logits(path, tokens)) < 1e-4


@pytest.mark.parametrize("kind", FAMILY)
def test_bits_are_the_same_at_every_width(tiny: Tiny, text: Text, whole: Whole, kernels: str, kind: str) -> None:
    length = 56  # past the window of 40
    decoder, tokens = load(tiny(kind), kernels=kernels).decoder, text(length)
    want = whole(decoder, tokens)
    for width in (1, 3, 8, 13):
        cache = decoder.new_cache()
        handle = cache.open(length)
        # Single rows past the window alone: they are most of the forwards.
        starts = [0, *range(44, length)] if width == 1 else list(range(0, length, width))
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            out = decoder.forward(tokens[start:stop], Rows.chains([(handle, start, stop - start)]), cache)
            assert torch.equal(out.logits, want[start:stop]), f"width {width} at {start}"


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_neighbours(tiny: Tiny, text: Text, whole: Whole, kernels: str, threads: int) -> None:
    decoder = load(tiny("llama"), threads=threads, kernels=kernels).decoder
    texts = [text(n, seed=n) for n in (5, 70, 33)]
    want = [whole(decoder, t) for t in texts]
    cache = decoder.new_cache()
    handles = [cache.open(80) for _ in texts]
    lengths = [0, 0, 0]
    generator = torch.Generator().manual_seed(3)
    while any(length < len(t) for length, t in zip(lengths, texts, strict=True)):
        spans, tokens, expected = [], [], []
        for i, full in enumerate(texts):
            count = min(int(torch.randint(0, 12, (), generator=generator)), len(full) - lengths[i])
            if count:
                spans.append((handles[i], lengths[i], count))
                tokens.append(full[lengths[i] : lengths[i] + count])
                expected.append(want[i][lengths[i] : lengths[i] + count])
                lengths[i] += count
        if spans:
            out = decoder.forward(torch.cat(tokens), Rows.chains(spans), cache)
            assert torch.equal(out.logits, torch.cat(expected))


def test_truncation_restores_the_state_exactly(tiny: Tiny, text: Text, whole: Whole, kernels: str) -> None:
    decoder, tokens = load(tiny("llama"), kernels=kernels).decoder, text(90)
    want = whole(decoder, tokens)
    cache = decoder.new_cache()
    handle = cache.open(100)
    decoder.forward(tokens[:40], Rows.chains([(handle, 0, 40)]), cache)
    for seed in range(5):
        decoder.forward(text(13, seed=50 + seed), Rows.chains([(handle, 40, 13)]), cache)
        cache.truncate(handle, 40)
    out = decoder.forward(tokens[40:], Rows.chains([(handle, 40, 50)]), cache)
    assert torch.equal(out.logits, want[40:])


def test_a_stale_key_would_be_noticed(tiny: Tiny, text: Text, whole: Whole, kernels: str) -> None:
    """The positive of the test above: one wrong key changes the logits."""
    decoder, tokens = load(tiny("llama"), kernels=kernels).decoder, text(90)
    want = whole(decoder, tokens)
    cache = decoder.new_cache()
    handle = cache.open(100)
    decoder.forward(tokens[:40], Rows.chains([(handle, 0, 40)]), cache)
    cache.write(0, handle, 17, torch.randn(1, 2, 16), torch.randn(1, 2, 16))
    out = decoder.forward(tokens[40:], Rows.chains([(handle, 40, 50)]), cache)
    assert not torch.equal(out.logits, want[40:])


def test_each_path_of_a_tree_equals_its_chain(tiny: Tiny, text: Text, whole: Whole, kernels: str) -> None:
    decoder, before = load(tiny("llama"), kernels=kernels).decoder, text(70)
    cache = decoder.new_cache()
    handle = cache.open(90)
    decoder.forward(before, Rows.chains([(handle, 0, 70)]), cache)
    parents, tokens = [-1, 0, 0, 1, 2, 2, 4], text(7, seed=9)
    depth = [70, 71, 71, 72, 72, 72, 73]
    rows = Rows(torch.tensor([handle] * 7), torch.tensor(depth), torch.tensor(parents))
    tree = decoder.forward(tokens, rows, cache).logits
    for leaf in range(7):
        path = [leaf]
        while parents[path[0]] != -1:
            path.insert(0, parents[path[0]])
        chain = whole(decoder, torch.cat((before, tokens[path])))
        assert torch.equal(tree[leaf], chain[-1])
    # Keeping one branch leaves exactly the cache of that chain.
    cache.keep(handle, 70, [0, 2, 4])
    more = decoder.forward(text(3, seed=11), Rows.chains([(handle, 73, 3)]), cache).logits
    assert torch.equal(more, whole(decoder, torch.cat((before, tokens[[0, 2, 4]], text(3, seed=11))))[-3:])


def test_logits_only_where_asked_for(tiny: Tiny, text: Text, whole: Whole, kernels: str) -> None:
    for kind in ("llama", "gpt2"):
        decoder, tokens = load(tiny(kind), kernels=kernels).decoder, text(20)
        cache = decoder.new_cache()
        out = decoder.forward(tokens, Rows.chains([(cache.open(20), 0, 20)]), cache, logits_at=torch.tensor([3, 19]))
        assert torch.allclose(out.logits, whole(decoder, tokens)[[3, 19]], atol=1e-5)
        assert out.hidden.shape == (2, 64)


def test_rows_that_contradict_the_cache_are_refused(tiny: Tiny, text: Text, whole: Whole, kernels: str) -> None:
    decoder = load(tiny("llama"), kernels=kernels).decoder
    cache = decoder.new_cache()
    handle = cache.open(64)
    with pytest.raises(ValueError, match="position"):
        decoder.forward(text(3), Rows.chains([(handle, 5, 3)]), cache)
    with pytest.raises(ValueError, match="token ids"):
        decoder.forward(torch.tensor([320]), Rows.chains([(handle, 0, 1)]), cache)
    assert cache.length(handle) == 0
    decoder.forward(text(3), Rows.chains([(handle, 0, 3)]), cache)
    assert cache.length(handle) == 3
