"""The table of measured choices: what it may say, which entries count, and which kernels a name gives."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from runtime.errors import UserError
from runtime.kernels.dispatch import BACKENDS, NAMES, Kernel, available, choose, libraries
from runtime.kernels.library_choice import IMPLEMENTATIONS, Choice, counting, packaged, parse, shown, wanted

TRITON = Kernel("triton", True, "a GPU, compute capability 9.0", exact=True)
ENTRY = {
    "capability": "9.0", "scheme": "int8", "first_row": 17, "last_row": None, "implementation": "torch-int-mm",
    "same_bits": True, "over_triton": 1.5, "measured_on": "a GPU",
}  # fmt: skip


def test_nothing_is_said_that_was_not_measured() -> None:
    """Whoever commits a measurement names the device; an invented entry would lack it."""
    assert all(one.measured_on and one.over_triton is not None for one in packaged())


def test_a_table_reads_back() -> None:
    table = parse(json.dumps([ENTRY, ENTRY | {"capability": "8.9", "last_row": 64}]), "t.json")
    assert table[0] == Choice((9, 0), "int8", 17, None, "torch-int-mm", True, 1.5, "a GPU")
    assert parse(shown(table), "t.json") == table and parse(shown([]), "t.json") == ()
    assert [table[1].holds(rows) for rows in (16, 17, 64, 65)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"implementation": "cutlass"}, "implementation 'cutlass' is unknown; use one of torch-int-mm"),
        ({"scheme": "int4"}, "torch-int-mm runs int8, found scheme 'int4'"),
        ({"capability": "7.5"}, "torch-int-mm needs compute capability 8.0, found 7.5"),
        (
            {"implementation": "torch-scaled-mm", "scheme": "fp8", "capability": "8.0"},
            "torch-scaled-mm needs compute capability 8.9, found 8.0",
        ),
        ({"capability": "new"}, "expected a compute capability as '9.0', found 'new'"),
        ({"first_row": 0}, "expected rows from 1 up"),
        ({"last_row": 16}, "expected rows from 1 up"),
        ({"same_bits": 1}, "same_bits must be true or false, found 1"),
        ({"over_triton": None}, "must say what was measured where, found None, 'a GPU'"),
        ({"measured_on": ""}, "must say what was measured where, found 1.5, ''"),
        ({"why": "it is quick"}, "must have the keys capability, first_row"),
    ],
)
def test_entries_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="t.json, entry 1.*" + said):
        parse(json.dumps([ENTRY | change]), "t.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "t.json is no JSON"),
        ("{}", "t.json must be a list of entries, found dict"),
        ("[1]", "entry 1 must have the keys .* found int"),
        (json.dumps([ENTRY, ENTRY | {"first_row": 64}]), "entry 2: rows from 64 of int8 are those of an entry before"),
        (json.dumps([ENTRY, ENTRY | {"first_row": 1, "last_row": 17}]), "entry 2: rows from 1 of int8 are those"),
    ],
)
def test_tables_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(text, "t.json")


def test_the_same_rows_may_have_a_quicker_entry_of_other_bits() -> None:
    other = ENTRY | {"implementation": "bitsandbytes", "same_bits": False}
    table = parse(json.dumps([ENTRY, other]), "t.json")
    assert counting(table, (9, 0), exact=True) == table[:1]
    quicker = counting(table, (9, 0), exact=False)
    assert quicker == (table if find_spec("bitsandbytes") is not None else table[:1])


def test_coarser_inputs_are_never_taken_unasked() -> None:
    coarse = ENTRY | {"implementation": "torch-scaled-mm", "scheme": "fp8", "first_row": 1}
    table = parse(json.dumps([coarse]), "t.json")
    assert counting(table, (9, 0), exact=True) == () and counting(table, (9, 0), exact=False) == table


def test_a_library_that_is_missing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (Choice((9, 0), "nf4", 1, None, "bitsandbytes", False),)
    for there in (None, object()):
        monkeypatch.setattr("runtime.kernels.library_choice.find_spec", lambda name, found=there: found)
        assert counting(table, (9, 0), exact=False) == (() if there is None else table)


def test_only_the_same_generation_s_measurements_count() -> None:
    table = parse(json.dumps([ENTRY]), "t.json")
    for capability in ((8, 9), (9, 1), (10, 0), None):
        assert counting(table, capability, exact=False) == ()


def test_what_a_name_asks_for() -> None:
    assert [(one.scheme, one.first_row, one.last_row) for one in wanted("torch")] == [
        (scheme, 1, None) for scheme in ("bf16", "fp16", "f32")
    ]
    assert wanted("torch-int-mm")[0].same_bits and not wanted("torch-scaled-mm")[0].same_bits


def test_libraries_are_there_for_who_asks_by_name() -> None:
    table = parse(json.dumps([ENTRY]), "t.json")
    found = {kernel.name: kernel for kernel in libraries(TRITON, (9, 0), table)}
    assert set(found) == {"library", *IMPLEMENTATIONS} - {"bitsandbytes"} and set(found) < set(NAMES)
    assert all(kernel.usable and kernel.backend is BACKENDS["triton"] for kernel in found.values())
    assert {name for name, kernel in found.items() if kernel.exact} == {"torch-int-mm"}
    assert found["library"].table == table and not found["library"].exact


def test_libraries_that_cannot_run_say_why() -> None:
    old = Kernel("triton", True, "A100 has compute capability 8.0", exact=True)
    found = {kernel.name: kernel for kernel in libraries(old, (8, 0), ())}
    assert not found["torch-scaled-mm"].usable
    assert found["torch-scaled-mm"].why == "A100 has compute capability 8.0, and torch-scaled-mm needs 8.9"
    assert found["torch-int4"].usable
    assert not found["library"].usable and "nothing was measured on compute capability 8.0" in found["library"].why
    without = Kernel("triton", False, "Triton is not installed", exact=True)
    for kernel in libraries(without, None, ()):
        assert not kernel.usable and kernel.why == "it runs beside Triton's kernels: Triton is not installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_gpu_a_library_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="kernels='torch-int4' cannot run here: it runs beside Triton's kernels"):
        choose("torch-int4", "cuda")
    names = [kernel.name for kernel in available("cuda")]
    assert names.index("reference") < names.index("library"), "auto takes the first that is usable"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_takes_what_was_measured_here_and_keeps_its_bits() -> None:
    capability = torch.cuda.get_device_capability()
    exact = Choice(capability, "int8", 17, None, "torch-int-mm", True)
    table = [exact, Choice(capability, "int4", 1, None, "torch-int4", False)]
    assert choose("auto", "cuda", table=table).table == (exact,)
    assert choose("library", "cuda", table=table).table == tuple(table)
    assert choose("triton", "cuda", table=table).table == ()
