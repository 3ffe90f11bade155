"""Every planted fault is found and named; the same model without it gives no alarm."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.check.check import check
from compress.check.findings import Result
from tests.compress.check import planted
from tests.compress.check.faults import FAULTS
from tests.compress.check.planted import Planted

Tiny = Callable[..., Path]
FORMS = tuple(dict.fromkeys(form for form, *_ in FAULTS))


@pytest.fixture(scope="module")
def original(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template, and a tokenizer that GGUF can hold."""
    folder = tmp_path_factory.mktemp("original") / "tiny"
    shutil.copytree(tiny("llama"), folder)
    planted.configure(folder, lambda t: t["pre_tokenizer"].update(use_regex=True), "tokenizer.json")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def sound(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(form: str) -> Path:
        if form not in made:
            made[form] = planted.write(original, tmp_path_factory.mktemp("sound") / form, form)
        return made[form]

    return get


def alarms(result: Result) -> list[str]:
    return [f"{f.level} {f.kind} {f.sentence}" for f in result.findings if f.level != "note"]


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_model_gives_no_alarm(sound: Callable[[str], Path], original: Path, form: str) -> None:
    result = check(sound(form), original)
    assert alarms(result) == []
    assert result.level == "good" and result.verdict == "good"
    assert form == "plain" or sum(weight.packed for weight in result.weights) >= 14


@pytest.mark.parametrize(("form", "fault"), [(form, name) for form, name, *_ in FAULTS])
def test_a_fault_is_found_and_named(
    sound: Callable[[str], Path], original: Path, tmp_path: Path, form: str, fault: str
) -> None:
    plant, expected = next((how, said) for f, name, how, said in FAULTS if (f, name) == (form, fault))
    folder = tmp_path / f"model{sound(form).suffix}"
    (shutil.copytree if sound(form).is_dir() else shutil.copyfile)(sound(form), folder)
    plant(folder)
    result = check(folder, original)
    found = alarms(result)
    assert any(named(line, expected) for line in found), (expected, found)
    assert len(found) <= 8, found
    assert result.level in ("broken", "suspicious") and result.verdict.startswith(result.level)


def named(line: str, expected: Planted) -> bool:
    return all(word in line for word in (expected.place, *expected.words))
