"""Times and memory of assignments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.best import costs
from compress.best.costs import WIDTHS, Costs, key_of
from compress.best.space import INT8, KEEP, OPTIONS, Option, Unit, find_units
from compress.model.source import open_sources
from compress.model.structure import read_structure
from compress.progress import silent
from runtime import load
from runtime.model.layers import weight_bytes

Tiny = Callable[..., Path]
INT4 = Option("int4", 64, "gptq")
UNITS = tuple(Unit(name, (name,), (name,), ((64, 64),), 0, (KEEP, INT8, INT4)) for name in ("a", "b"))


def made(share: float = 1.0, rest: float = 0.5) -> Costs:
    products = {
        key_of(UNITS[0], option): tuple(ms * (1 + width / 10) for width in WIDTHS)
        for option, ms in ((KEEP, 4.0), (INT8, 2.0), (INT4, 1.0))
    }
    return Costs(products, dict.fromkeys(products, 4096), (rest,) * len(WIDTHS), 1000, share)


def test_a_forward_is_the_sum_of_its_products_and_the_rest() -> None:
    found = made().forward(UNITS, {"a": INT8, "b": INT4})
    assert found[1] == pytest.approx(0.5 + 3.0 * 1.1) and list(found) == list(WIDTHS)


def test_share_and_rest_are_what_two_whole_forwards_say() -> None:
    truth = replace(made(share=1.4, rest=0.8))
    seen = [({"a": one, "b": one}, truth.forward(UNITS, {"a": one, "b": one})) for one in (KEEP, INT4)]
    fitted = made().refitted(UNITS, seen)
    assert fitted.share == pytest.approx(1.4) and fitted.rest == pytest.approx(truth.rest)
    other = {"a": INT8, "b": INT4}
    assert fitted.forward(UNITS, other) == pytest.approx(truth.forward(UNITS, other))


def test_costs_are_read_back_as_they_were() -> None:
    assert Costs.from_dict(made(1.2).to_dict()) == made(1.2)


def test_codes_of_fewer_bits_take_the_time_of_their_container() -> None:
    keys = {key_of(UNITS[0], option) for option in OPTIONS if option.group_size == 64}
    assert len(keys) == 1 and key_of(UNITS[0], INT8) not in keys


def test_every_product_is_timed_and_memory_adds_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_SECONDS", 0.2)
    path = tiny("llama")
    source, _ = open_sources(str(path), None)
    units = find_units(source.shapes(), read_structure(source.path))
    model = load(path, threads=1)
    whole = weight_bytes(model.decoder.parts)
    found = costs.measure(model, units, torch.float32, list(range(1, 33)), whole, silent)
    for unit in units:
        for option in unit.options:
            assert all(found.product(unit, option, width) > 0 for width in WIDTHS)
    assert found.other + sum(found.memory(unit, KEEP) for unit in units) == whole
    assert all(rest >= 0 for rest in found.rest)
    assert found.memory(units[0], INT8) < found.memory(units[0], KEEP) / 3
