import re
from time import perf_counter

import pytest

from runtime.formats.patterns import trouble

NAME = "model.layers.17.block_sparse_moe.experts.103.down_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        *(".*", "", "lm_head", r"layers\.(0|1|2|[12]\d)\.mlp", "(?i)MLP|attn", "^(?!.*down_proj)", r"(?:\.\d+)?$"),
        *(r".*layers\.\d+\..*(gate|up|q|k|v)_proj.*", ".*.*.*!", "[a-z]{2,5}_proj", "a{1000}", r"(a)?(?(1)b|.*)"),
    ],
)
def test_what_people_write_is_taken_and_ends(pattern: str) -> None:
    assert trouble(pattern) is None
    begun = perf_counter()
    re.search(pattern, NAME)
    assert perf_counter() - begun < 1


@pytest.mark.parametrize(
    "pattern",
    [
        *("([a-z_.]+)+$X", "(.+)+[0-9]{99}", "(?:(?:[a-z0-9_.]*)*)*!", "[a-z0-9_.]*" * 30 + "!", "(a|.|[a-z.]+)*!"),
        *(".?" * 40 + "!", "(?:.|a)(?:.|m)" * 20 + "!", "(?>a+b?)+", "((a{1,9}){1,9}){1,9}", "(?=(.*)*)x", ".+?" * 9),
    ],
)
def test_what_could_search_for_ever_is_refused(pattern: str) -> None:
    assert "could take for ever" in (trouble(pattern) or "")


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(" * 5000, "*", "[z-a]", "(?P<n"])
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    assert trouble(pattern)
