"""The sweep over our own settings, and certificates: equal where all is sound, and what differs where it is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime import load
from runtime.audit import ours
from runtime.audit.certificate import Certificate
from runtime.audit.certificate_command import repeat_certificate
from runtime.audit.certify import certify, compare
from runtime.audit.known import letter_ids
from runtime.audit.options import CertificateOptions
from runtime.audit.ours_command import judged
from runtime.errors import UserError
from runtime.model.load import Model


@pytest.fixture(scope="module")
def pair(known_folder: Path) -> tuple[Model, Model]:
    return load(known_folder / "target", threads=1), load(known_folder / "draft", threads=1)


def task(pair: tuple[Model, Model], settings: int = 12, seconds: float = 60.0) -> ours.Sweep:
    prompts = ours.random_prompts(258, letter_ids(), 0)
    return ours.Sweep(*pair, prompts=prompts, settings=settings, seconds=seconds, new_tokens=7, seed=1)


def test_a_sweep_goes_on_from_its_file(pair: tuple[Model, Model], tmp_path: Path) -> None:
    file, told = tmp_path / "results.jsonl", list[int]()
    found = ours.sweep(task(pair), file, lambda done, total: told.append(done))
    assert len(found) == len(told) == 12 and len({one.drafter for one in found}) > 2
    assert sum(one.tokens for one in found) == 12 * 7 * ours.PROMPTS and judged(found, 12)[0] == "lossless"
    # The last line was cut off by a kill.
    file.write_bytes(file.read_bytes()[:-9])
    again = ours.sweep(task(pair, seconds=0.0), file, lambda done, total: None)
    assert again == found[:11] and judged(again, 12)[0] == "cannot tell"
    assert len(ours.sweep(task(pair), file, lambda done, total: None)) == 12
    with pytest.raises(UserError, match="another sweep"):
        ours.sweep(ours.Sweep(*pair, [[3]], 1, 9.0, 4, 1), file, lambda done, total: None)


def test_a_token_that_differs_is_shown(pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ours.Sweep._expected

    def wrong(self: ours.Sweep, case: ours.Case, sampling: Any) -> list[list[int]]:
        texts = [list(text) for text in sound(self, case, sampling)]
        texts[2][4] += 1
        return texts

    monkeypatch.setattr(ours.Sweep, "_expected", wrong)
    found = ours.sweep(task(pair, 2), None, lambda done, total: None)
    verdict, sentence = judged(found, 2)
    assert verdict == "differs" and "2 of 112 tokens differ" in sentence and "prompt 3 after 4 tokens" in sentence


PROMPTS = [[70, 71, 72], [64] * 9]


def write_run(folder: Path, known_folder: Path, certificate: Certificate) -> Path:
    for name, source in (("model", "target"), ("draft", "draft")):
        (folder / name).mkdir(parents=True)
        for file in (known_folder / source).iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    (folder / "report.json").write_text(json.dumps({"certificate": certificate.model_dump(mode="json")}))
    return folder


def test_a_certificate_is_repeated_on_other_kernels(
    pair: tuple[Model, Model], known_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = certify(*pair, PROMPTS, ["lookup", "model"])
    assert len(made.texts) == 4 and not any(text.differing for text in made.texts) and made.logits
    run = write_run(tmp_path / "run", known_folder, made)
    repeat_certificate(CertificateOptions(run=run / "model", kernels="reference"))
    said = capsys.readouterr().out
    assert said.startswith("equal: 64 tokens of 4 texts and 9 digests of logits") and "reference on" in said


def test_what_differs_from_a_certificate_is_told(
    pair: tuple[Model, Model], known_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = certify(*pair, PROMPTS, ["lookup"])
    text = made.texts[3].model_copy(update={"sha256": "0" * 64})
    changed = made.model_copy(
        update={"texts": [*made.texts[:3], text], "logits": (made.logits or {}) | {"int8 tree": "0"}}
    )
    assert compare(made, made) == [] and len(compare(changed, made)) == 2
    run = write_run(tmp_path / "run", known_folder, changed)
    with pytest.raises(Exception) as ended:
        repeat_certificate(CertificateOptions(run=run))
    assert getattr(ended.value, "exit_code", None) == 1
    said = capsys.readouterr().out
    assert "tokens of text 4 (temperature 0.8, seed 1) are others" in said and "logits differ: int8 tree" in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"texts": 3}, r"certificate\.texts"), ({"prompts": [[-1]]}, "token ids"), (None, "holds no certificate")],
)
def test_broken_certificates_are_told(
    pair: tuple[Model, Model], tmp_path: Path, change: dict[str, Any] | None, sentence: str
) -> None:
    made = certify(*pair, PROMPTS[:1], [], new_tokens=2).model_dump(mode="json")
    said = {} if change is None else {"certificate": made | change}
    (tmp_path / "report.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=sentence):
        repeat_certificate(CertificateOptions(run=tmp_path))
