"""The known model: float64 against transformers, our decoder and the GGUF file; its distributions; its files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import load
from runtime.audit import known_files
from runtime.audit.directions import directions
from runtime.audit.known import LETTERS, read
from runtime.audit.sampled import Known
from runtime.contract import Rows
from runtime.errors import UserError


def texts(known: Known, rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).choice(known.target.letters, (rows, length))


@pytest.mark.parametrize("name", ["target", "draft", "target.gguf", "draft-f16.gguf"])
def test_engines_compute_what_float64_says(known: Known, known_folder: Path, name: str) -> None:
    model = known.target if name.startswith("target") else known.draft
    text = texts(known, 1, 37)
    decoder = load(known_folder / name, threads=1).decoder
    cache = decoder.new_cache("float32")
    rows = Rows.chains([(cache.open(64), 0, 37)])
    found = decoder.forward(torch.from_numpy(text[0]), rows, cache).logits.double().numpy()
    exact = model.logits(text)[0]
    assert np.abs(found[:, list(model.letters)] - exact[:, :-1]).max() < 1e-4
    others = np.setdiff1d(np.arange(found.shape[1]), model.letters)
    assert np.abs(found[:, others] - exact[:, -1:]).max() < 1e-3 and (exact[:, -1] < exact[:, :-1].min(1) - 20).all()


def test_transformers_computes_it_too(known: Known, known_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = texts(known, 2, 11)
    logits = AutoModelForCausalLM.from_pretrained(known_folder / "target")(torch.from_numpy(text)).logits.detach()
    assert (
        np.abs(logits.double().numpy()[..., list(known.target.letters)] - known.target.logits(text)[..., :-1]).max()
        < 1e-4
    )
    tokenizer = AutoTokenizer.from_pretrained(known_folder / "target")
    assert tokenizer(LETTERS)["input_ids"] == list(known.target.letters) == known.target.encode(LETTERS)
    assert tokenizer.decode(known.target.encode("tabq")) == "tabq"


def test_a_cache_gives_the_logits_of_the_whole_text(known: Known) -> None:
    """Pieces at ragged positions, over what a rejected draft left behind."""
    text, model = texts(known, 3, 20, 1), known.target
    whole, cache = model.logits(text), model.cache(3, 24)
    model.extend(cache, text[:, :9], np.zeros(3, dtype=np.int64))
    starts = np.array([5, 7, 9])
    model.extend(cache, texts(known, 3, 4, 2), starts)
    pieces = np.stack([row[at : at + 6] for row, at in zip(text, starts, strict=True)])
    found = model.extend(cache, pieces, starts)
    for row, at in enumerate(starts):
        assert np.abs(found[row] - whole[row, at : at + 6]).max() < 1e-9


def test_distributions_are_cut_as_asked(known: Known) -> None:
    logits = known.target.logits(texts(known, 5, 30))
    whole, sure = known.target.probabilities(logits, 1.0)
    assert sure.all() and np.abs(whole.sum(-1) - 1).max() < 1e-12
    cut, sure = known.target.probabilities(logits, 1.0, top_k=3)
    assert ((cut > 0).sum(-1) == 3).all() and 0.5 < sure.mean() <= 1
    nucleus, _ = known.target.probabilities(logits, 1.0, top_p=0.7)
    mass = np.where(nucleus > 0, whole, 0).sum(-1)
    least = np.where(nucleus > 0, whole, 2).min(-1)
    assert (mass >= 0.7).all() and (mass - least < 0.7).all()


@pytest.mark.parametrize("gumbel", [False, True])
def test_directions_are_what_such_a_sampler_gives(gumbel: bool) -> None:
    rng = np.random.default_rng(int(gumbel))
    p, q = (rng.dirichlet(np.ones(7) * 0.8, 1) for _ in range(2))
    r = np.maximum(p - q, 0)[0] / np.maximum(p - q, 0).sum()
    count, noise = 200_000, None
    if gumbel:
        noise = rng.exponential(size=(count, 7))
        with np.errstate(divide="ignore"):
            x, y = (noise / q[0]).argmin(1), (noise / r).argmin(1)
    else:
        noise = rng.random((count, 1))
        x, y = ((noise >= one.cumsum()).sum(1).clip(0, 6) for one in (q[0], r))
    kept = rng.random(count) < (p / q)[0][x]
    found = np.bincount(np.where(kept, x, y), minlength=7) / count
    name = f"a rejected draft's {'Gumbel ' * gumbel}noise again"
    assert np.abs(found - directions(p, q)[name][0]).max() < 5e-3
    # The rule itself is somewhere else.
    assert np.abs(found - p[0]).max() > 1e-2


def test_the_same_seed_writes_the_same_files(known_folder: Path, tmp_path: Path) -> None:
    known_files.write(tmp_path / "again", 7)
    known_files.write(tmp_path / "other", 8)
    for name in ("target.gguf", "draft/model.safetensors", "target/config.json"):
        same = (known_folder / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == same
    assert (tmp_path / "other" / "target.gguf").read_bytes() != (known_folder / "target.gguf").read_bytes()
    with pytest.raises(UserError, match="exists"):
        known_files.write(tmp_path / "again", 7)


def test_other_folders_are_refused(known_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"audit\.json"):
        read(tmp_path)
    known_files.write(tmp_path / "broken", 7)
    (tmp_path / "broken/target/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        read(tmp_path / "broken")
