"""Teachers, what is kept of them on disk, and whose text is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.distill import cached_logits, on_policy
from compress.distill.cached_logits import LogitsCache, NumberedBatches
from compress.distill.divergences import DIVERGENCES, divergence
from compress.distill.on_policy import decoder_writer, gumbel_sample, model_writer, snapshot, write_samples
from compress.distill.teacher import Teacher, narrowed, of_decoder, of_model
from compress.errors import UserError
from compress.recipe.training import Settings
from compress.training.parallel import World
from runtime import load

TOKENS = torch.randint(0, 320, (3, 20), generator=torch.Generator().manual_seed(0))
WHO = {"teacher": "some"}


def silent(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).eval()


def random_teacher(width: int) -> Teacher:
    table = torch.randn(320, width, generator=torch.Generator().manual_seed(7)) * 2
    return lambda tokens: table[tokens]


def test_a_decoder_teaches_what_its_model_says(tiny: Callable[..., Path], model: Any) -> None:
    served, plain = of_decoder(load(tiny("llama")).decoder), of_model(model)
    assert served(TOKENS).shape == (3, 20, 320)
    torch.testing.assert_close(served(TOKENS), plain(TOKENS), rtol=1e-3, atol=1e-3)
    assert not plain(TOKENS).requires_grad
    # The loop's autocast is not for the teacher.
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(served(TOKENS), of_decoder(load(tiny("llama")).decoder)(TOKENS))
    reference = of_decoder(load(tiny("llama"), kernels="reference").decoder)
    exact = reference(TOKENS[:1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference(TOKENS[:1]), exact)
    with pytest.raises(UserError, match="at most the teacher's 256 positions, found 257"):
        served(torch.zeros(1, 257, dtype=torch.int64))


def test_a_padded_vocabulary_is_cut(tiny: Callable[..., Path]) -> None:
    found = of_decoder(load(tiny("llama")).decoder)(TOKENS)
    assert narrowed(found, 300).shape == (3, 20, 300)
    with pytest.raises(ValueError, match="at least 321"):
        narrowed(found, 321)


def test_kept_logits_are_a_proper_distribution(tmp_path: Path) -> None:
    teacher, path = random_teacher(50), tmp_path / "logits.bin"
    cached_logits.write(path, teacher, TOKENS, 8, WHO, silent, rows=2)
    cache = LogitsCache(path, WHO)
    assert (len(cache), cache.k, cache.length) == (3, 8, 20)
    found = cache.take(torch.tensor([2, 0]))
    wanted = teacher(TOKENS[[2, 0]]).softmax(-1)
    assert torch.equal(found.tokens, wanted.topk(8, dim=-1).indices)
    torch.testing.assert_close(found.log_probs.exp().sum(-1), torch.ones(2, 20))
    torch.testing.assert_close(found.log_probs[..., :8].exp(), wanted.topk(8, dim=-1).values)
    student = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(1), requires_grad=True)
    whole = divergence(student.flatten(0, 1), teacher(TOKENS[[2, 0]]).flatten(0, 1), "forward_kl")
    kept = found.divergence(student, "forward_kl")
    assert 0.5 * whole.item() < kept.item() < whole.item()
    [gradient] = torch.autograd.grad(kept, student)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    # A student that gives everything to the kept tokens is not perfect.
    greedy = torch.full((2, 20, 50), -40.0).scatter(2, found.tokens, found.log_probs[..., :8])
    for kind in DIVERGENCES:
        same = found.divergence(teacher(TOKENS[[2, 0]]), kind).item()
        assert same == pytest.approx(0, abs=1e-5)
        assert found.divergence(greedy, kind).item() > same + 0.01


def test_numbered_windows_are_all_taken_in_every_epoch() -> None:
    windows = torch.randint(0, 320, (5, 9), generator=torch.Generator().manual_seed(2))
    batches = NumberedBatches(windows, Settings(batch=2, gradient_accumulation_steps=2, length=8))
    rows = [row for step in range(5) for micro in range(2) for row in batches.take(step, micro)]
    numbers = [int(row[0]) for row in rows]
    assert all(torch.equal(row[1:], windows[row[0]]) for row in rows)
    epochs = [numbers[first : first + 5] for first in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    # Any step by itself, and dealt out to two processes.
    assert torch.equal(
        NumberedBatches(windows, Settings(batch=2, gradient_accumulation_steps=2, length=8)).take(3, 1),
        rows_of(rows, 14),
    )
    dealt = [NumberedBatches(windows, Settings(batch=2, length=8), World(rank, 2)).take(3, 0) for rank in (0, 1)]
    assert torch.equal(torch.cat(dealt), rows_of(rows, 6))


def rows_of(rows: list[Tensor], first: int) -> Tensor:
    return torch.stack(rows[first : first + 2])


def test_a_damaged_cache_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "logits.bin"
    with pytest.raises(UserError, match=r"logits\.bin: expected a teacher's answers"):
        LogitsCache(path, WHO)
    cached_logits.write(path, random_teacher(50), TOKENS, 4, WHO, silent)
    with pytest.raises(UserError, match="'another'"):
        LogitsCache(path, {"teacher": "another"})
    assert len(LogitsCache(path, WHO)) == 3
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="found none"):
        LogitsCache(path, WHO)
    path.unlink()
    with pytest.raises(UserError, match="found none"):
        LogitsCache(path, WHO)


def test_a_teacher_that_fails_leaves_no_cache(tmp_path: Path) -> None:
    calls = []

    def broken(tokens: Tensor) -> Tensor:
        calls.append(tokens)
        logits = random_teacher(50)(tokens)
        if len(calls) == 2:
            logits[0, 3] = torch.nan
        return logits

    with pytest.raises(UserError, match="windows from 2 on"):
        cached_logits.write(tmp_path / "logits.bin", broken, TOKENS, 4, WHO, silent, rows=1)
    with pytest.raises(UserError, match="found none"):
        LogitsCache(tmp_path / "logits.bin", WHO)
    cached_logits.write(tmp_path / "logits.bin", random_teacher(50), TOKENS, 4, WHO, silent)
    assert len(LogitsCache(tmp_path / "logits.bin", WHO)) == 3


def test_sampling_by_chi_squared() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    for temperature in (1.0, 0.5):
        wanted = (logits / temperature).softmax(-1)[:4]
        drawn = gumbel_sample(logits.expand(20_000, 5), torch.Generator().manual_seed(2), temperature)
        counts = torch.bincount(drawn, minlength=5)
        assert counts[4] == 0
        assert float(((counts[:4] - 20_000 * wanted).square() / (20_000 * wanted)).sum()) < 16.3  # 3 degrees, 0.001
        other = (logits / 0.8).softmax(-1)[:4]
        assert float(((counts[:4] - 20_000 * other).square() / (20_000 * other)).sum()) > 50
    assert gumbel_sample(logits.expand(3, 5), torch.Generator(), 0.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", ["decoder", "model"])
def test_writers_continue_prompts(tiny: Callable[..., Path], model: Any, how: str) -> None:
    decoder = load(tiny("llama")).decoder
    greedy = decoder_writer(decoder, 0.0) if how == "decoder" else model_writer(model, 0.0)
    found = greedy(TOKENS, 6, torch.Generator())
    assert torch.equal(found[:, :20], TOKENS)
    for end in range(20, 26):
        assert torch.equal(of_decoder(decoder)(found[:, :end])[:, -1].argmax(-1), found[:, end])
    hot = decoder_writer(decoder) if how == "decoder" else model_writer(model)
    first, again, other = (hot(TOKENS, 6, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_snapshot_has_the_weights_of_the_moment(tiny: Callable[..., Path], tmp_path: Path) -> None:
    student = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).eval()
    for _ in range(2):
        found = of_decoder(snapshot(student, tmp_path / "s", None))(TOKENS)
        torch.testing.assert_close(found, student(TOKENS).logits.detach(), rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            student.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert not torch.allclose(found, of_decoder(load(tiny("llama")).decoder)(TOKENS), atol=0.05)


def test_samples_are_written_once(tiny: Callable[..., Path], tmp_path: Path) -> None:
    decoder, calls = load(tiny("llama")).decoder, list[int]()

    def prompts(rows: int, generator: torch.Generator) -> Tensor:
        calls.append(rows)
        return torch.randint(0, 320, (rows, 5), generator=generator)

    def write(seed: int = 0) -> np.ndarray[Any, Any]:
        writers = [decoder_writer(decoder, 0.0), decoder_writer(decoder, 1.0)]
        return np.array(write_samples(tmp_path / "s.bin", writers, prompts, 7, 12, seed, silent, rows=3).tokens)

    first = write()
    assert first.shape == (7, 12) and calls == [3, 3, 1]
    # The first batch and the third are greedy.
    for row in (0, 6):
        text = torch.from_numpy(first[row : row + 1].astype(np.int64))
        assert torch.equal(of_decoder(decoder)(text)[0, 4:-1].argmax(-1), text[0, 5:])
    assert np.array_equal(write(), first) and len(calls) == 3
    assert not np.array_equal(write(1), first) and len(calls) == 6
    content = (tmp_path / "s.bin").read_bytes()
    (tmp_path / "s.bin").write_bytes(bytes(len(content)))
    write(1)
    assert len(calls) == 9
    assert json.loads((tmp_path / "s.bin.json").read_bytes())["seconds"] > 0
    # One batch of each writer, however little time there is.
    short = write_samples(
        tmp_path / "t.bin", [decoder_writer(decoder)] * 2, prompts, 30, 12, 0, silent, seconds=0.0, rows=3
    )
    assert short.tokens.shape == (6, 12)
    assert on_policy.Samples(first, 0.0).take(torch.tensor([6, 0])).tolist() == first[[6, 0]].tolist()
