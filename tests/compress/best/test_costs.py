"""Times and memory of assignments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compress.best import forwards
from compress.best.costs import KEPT, WIDTHS, Costs, alike, key_of
from compress.best.space import INT8, KEEP, OPTIONS, Option, Unit, find_units
from compress.best.stand_in import stand_in
from compress.model.structure import read_structure
from compress.progress import silent
from runtime import Speculator, load
from runtime.checkpoints.open import open_checkpoint
from runtime.model.layers import weight_bytes

Tiny = Callable[..., Path]
INT4 = Option("int4", 64, "gptq")
UNITS = tuple(Unit(name, (name,), (name,), ((64, 64),), 0, (KEEP, INT8, INT4)) for name in ("a", "b"))


def made(rest: float = 0.5) -> Costs:
    products = {
        key_of(UNITS[0], option): tuple(ms * (1 + width / 10) for width in WIDTHS)
        for option, ms in ((KEEP, 4.0), (INT8, 2.0), (INT4, 1.0))
    }
    return Costs(products, dict.fromkeys(products, 4096), (rest,) * len(WIDTHS), 1000, (0.1,) * len(WIDTHS))


def test_a_forward_is_the_sum_of_its_products_and_the_rest() -> None:
    found = made().forward(UNITS, {"a": INT8, "b": INT4})
    assert found[1] == pytest.approx(0.5 + 3.0 * 1.1) and list(found) == list(WIDTHS)
    assert made().round(UNITS, {"a": INT8, "b": INT4})[1] == pytest.approx(found[1] + 0.1)


def test_forwards_of_layers_held_alike_are_what_was_measured_and_others_lie_between() -> None:
    alone = made(rest=0.0)
    factors = {KEPT: 1.3, "int8 0": 1.1, "int4 64": 1.7}
    truth = replace(
        made(rest=0.8), products={key: tuple(factors[key[2]] * ms for ms in row) for key, row in alone.products.items()}
    )
    assignments = {key_of(UNITS[0], option)[2]: {"a": option, "b": option} for option in (KEEP, INT8, INT4)}
    wholes = [(how, truth.forward(UNITS, assignment)) for how, assignment in assignments.items()]
    fitted = alone.fitted(UNITS, wholes)
    for how, whole in wholes:
        assert fitted.forward(UNITS, assignments[how]) == pytest.approx(whole)
    mixed = {"a": INT8, "b": INT4}
    assert fitted.forward(UNITS, mixed) == pytest.approx(truth.forward(UNITS, mixed))


def test_units_that_cannot_be_held_so_stay_as_they_are_in_the_fit() -> None:
    odd = Unit("odd", ("odd",), ("odd",), ((64, 64),), 1, (KEEP, INT8))
    units, alone = (*UNITS, odd), made(rest=0.0)
    assert alike(units, "int4 64")[odd] == KEEP and alike(units, "int8 0")[odd] == INT8
    truth = made(rest=0.8)
    all_of = {how: {unit.name: option for unit, option in alike(units, how).items()} for how in (KEPT, "int4 64")}
    wholes = [(how, truth.forward(units, assignment)) for how, assignment in all_of.items()]
    fitted = alone.fitted(units, wholes)
    for how, whole in wholes:
        assert fitted.forward(units, all_of[how]) == pytest.approx(whole)


def test_costs_are_read_back_as_they_were() -> None:
    assert Costs.from_dict(made(1.2).to_dict()) == made(1.2)


def test_codes_of_fewer_bits_take_the_time_of_their_container() -> None:
    keys = {key_of(UNITS[0], option) for option in OPTIONS if option.group_size == 64}
    assert len(keys) == 1 and key_of(UNITS[0], INT8) not in keys


def test_a_model_is_timed_and_its_memory_adds_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_MOST", 5)
    path = tiny("llama")
    checkpoint = open_checkpoint(path)
    units = find_units({name: checkpoint.shape(name) for name in checkpoint.names()}, read_structure(path))
    model = load(path, threads=1)
    found = forwards.time_model(model, checkpoint, units, list(range(1, 33)), silent)
    for unit in units:
        for option in unit.options:
            assert all(found.product(unit, option, width) >= 0 for width in WIDTHS)
    assert found.other + sum(found.memory(unit, KEEP) for unit in units) == weight_bytes(model.decoder.parts)
    assert all(rest >= 0 for rest in (*found.rest, *found.beyond))
    assert found.memory(units[0], INT8) < found.memory(units[0], KEEP) / 3
    assert all(spent > 0 for spent in found.forward(units, {unit.name: KEEP for unit in units}).values())


def test_a_stand_in_has_the_schemes_of_its_assignment_and_the_originals_other_weights(tiny: Tiny) -> None:
    path = tiny("llama")
    checkpoint = open_checkpoint(path)
    units = find_units({name: checkpoint.shape(name) for name in checkpoint.names()}, read_structure(path))
    model = load(path, threads=1)
    assignment = {unit.name: unit.options[i % len(unit.options)] for i, unit in enumerate(units)}
    found = stand_in(model, checkpoint, units, assignment)
    assert found is not None
    known = forwards.time_model(model, checkpoint, units, list(range(1, 9)), silent)
    expected = known.other + sum(known.memory(unit, assignment[unit.name]) for unit in units)
    assert weight_bytes(found.decoder.parts) == expected
    kept = stand_in(model, checkpoint, units, {unit.name: KEEP for unit in units})
    assert kept is not None
    tokens, texts = [5, 6, 7], []
    for one in (model, kept, found):
        texts.append(Speculator(one).generate([tokens], max_new_tokens=8, stop=())[0].tokens)
    assert texts[0] == texts[1] != texts[2]
