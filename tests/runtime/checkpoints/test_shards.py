"""Shards: equal to what the library wrote, few openings for many tensors, no file mapped longer than needed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoints import safetensors as shards
from runtime.checkpoints.safetensors import INDEX, Shards


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened."""
    counts: Counter[str] = Counter()
    opens = safetensors.safe_open

    def counting(path: Path, **options: Any) -> Any:
        counts[Path(path).name] += 1
        return opens(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", counting)
    return counts


def many(folder: Path) -> dict[str, Tensor]:
    """Writes two files of 300 tensors of odd sizes each, in each of which one is large."""
    generator = torch.Generator().manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    files = {}
    for number in (0, 1):
        sizes = [*torch.randint(0, 700, (299,), generator=generator).tolist(), (1 << 21) + 5]
        files[f"{number}.safetensors"] = {
            f"{number}.{i:03d}": (torch.randn(size, generator=generator) * 50).to(dtypes[i % 3])
            for i, size in enumerate(sizes)
        }
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def test_small_tensors_share_an_opening(tmp_path: Path, opened: Counter[str]) -> None:
    """Each reads the whole header: half an hour for a mixture of 24 layers with 128 experts, if done for each."""
    tensors = many(tmp_path / "m")
    found = Shards(tmp_path / "m")
    opened.clear()
    # From one file and the other in turns.
    for name in sorted(tensors, key=lambda name: name[::-1]):
        assert found[name].dtype == tensors[name].dtype and torch.equal(found[name], tensors[name]), name
    # One for all small tensors, and one for each of two readings of the large one.
    assert opened == {"0.safetensors": 3, "1.safetensors": 3}


def test_files_are_let_go_of_after_some_bytes(
    tmp_path: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = many(tmp_path / "m")
    found = Shards(tmp_path / "m")
    opened.clear()
    small = [name for name in sorted(tensors) if tensors[name].numel() < 700]
    total = sum(tensors[name].nbytes for name in small)
    monkeypatch.setattr(shards, "_TOGETHER", total // 10)
    kept = {name: found[name] for name in small}
    assert 8 <= sum(opened.values()) <= 12
    assert all(torch.equal(kept[name], tensors[name]) for name in small)


def test_what_was_read_maps_only_the_large_ones(tmp_path: Path) -> None:
    def mapped() -> bool:
        return str(tmp_path / "m") in Path("/proc/self/maps").read_text()

    many(tmp_path / "m")
    found = Shards(tmp_path / "m")
    small, large = found["0.001"], found["1.299"]
    assert mapped()
    del found
    assert mapped()
    del large
    assert not mapped() and small.numel()
