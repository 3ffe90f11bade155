"""Every causal architecture that transformers builds here: a recipe, then decoding with drafts and without."""

import multiprocessing
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import compress
from compress.errors import USER_ERRORS
from runtime import Speculator, load
from runtime.models.matrix import model_types
from runtime.speculative.drafters.lookup import LookupDrafter
from tests.compress.tiny_architectures import make

RECIPES = ("int8-dynamic", "int4-rtn", "nf4")
PROMPT = [5, 9, 17, 300, 41, 7, 88, 5, 9, 17, 300, 41]
TRACEBACK = "Traceback"


def tried(family: str, folder: Path) -> Iterator[str]:
    """ "" once a recipe has compressed a tiny model of the family and it has decoded; before, why others would not."""
    try:
        make(family, folder / "source")
    except USER_ERRORS as error:
        yield str(error)
        return
    options: dict[str, Any] = {"speed": False, "eval_tokens": 64, "seq_len": 32, "samples": 4, "threads": 1}
    for recipe in RECIPES:
        try:
            model = load(compress(folder / "source", recipe, folder / recipe, **options).model, threads=1)
            plain, drafted = (
                Speculator(model, drafter, draft_length=3).generate([PROMPT], max_new_tokens=12, stop=())[0].tokens
                for drafter in (None, LookupDrafter())
            )
            assert plain == drafted and len(plain) == 12, (plain, drafted)
        except USER_ERRORS as error:
            yield f"{recipe}: {error}"
            continue
        except Exception:
            yield f"{recipe}: {traceback.format_exc()}"
            return
        yield ""
        return


def outcome(family: str, folder: str) -> list[str]:
    """All that was said of a family, in a process of its own."""
    torch.set_num_threads(1)
    return list(tried(family, Path(folder)))


@pytest.mark.slow
def test_no_traceback_each_refusal_a_sentence_and_150_decode(tmp_path: Path) -> None:
    families = list(model_types())
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(families, pool.map(outcome, families, [str(tmp_path / f) for f in families]), strict=True))
    assert not {family: said for family, said in found.items() if any(TRACEBACK in one for one in said)}
    for said in found.values():
        assert all("\n" not in one and len(one) < 700 for one in said)
    decode = [family for family, said in found.items() if said[-1] == ""]
    print(f"{len(decode)} of {len(families)} architectures compress and decode; not: {set(families) - set(decode)}")
    assert len(decode) >= 150
