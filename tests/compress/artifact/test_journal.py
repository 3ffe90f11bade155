"""The journal: what it lists is on disk, and it goes on only with what it was started with."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from compress.artifact import journal
from compress.errors import UserError

FINGERPRINT = {"recipe": {"name": "nf4", "stages": [{"scheme": "nf4"}]}, "seed": 3, "files": {"a": 1}}

CONTENT = b"12345"
RECORD = {"file": "part-0", "bytes": 5, "sha256": hashlib.sha256(CONTENT).hexdigest()}


def begun(folder: Path) -> journal.Journal:
    made = journal.begin(folder, FINGERPRINT)
    (folder / "part-0").write_bytes(CONTENT)
    made.commit("block 0", {**RECORD, "layers": [{"error": 0.125}]})
    return made


def test_resume_gives_back_what_was_committed(tmp_path: Path) -> None:
    made = begun(tmp_path)
    again = journal.resume(tmp_path, json.loads(json.dumps(FINGERPRINT)))
    assert again.parts == made.parts
    assert again.inputs is None and not again.finished
    again.commit("block 1", {**RECORD, "layers": []}, inputs={**RECORD, "block": 2})
    last = journal.resume(tmp_path, FINGERPRINT)
    assert list(last.parts) == ["block 0", "block 1"]
    assert last.inputs == {**RECORD, "block": 2}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"recipe": {"name": "nf4", "stages": [{"scheme": "int4"}]}}, "recipe.stages.0.scheme was 'nf4' and is 'int4'"),
        ({"files": {"a": 2}}, "files.a was 1 and is 2"),
        ({"files": {}}, "files.a was 1 and is None"),
    ],
)
def test_resume_says_what_has_changed(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    begun(tmp_path)
    with pytest.raises(UserError, match="--resume needs what the run was started with") as caught:
        journal.resume(tmp_path, FINGERPRINT | change)
    assert expected in str(caught.value)


def test_resume_needs_every_file_that_is_listed(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "part-0").write_bytes(b"12346")
    with pytest.raises(UserError, match="part-0 is damaged"):
        journal.resume(tmp_path, FINGERPRINT)
    (tmp_path / "part-0").write_bytes(b"123")
    with pytest.raises(UserError, match="expected 5 bytes"):
        journal.resume(tmp_path, FINGERPRINT)
    (tmp_path / "part-0").unlink()
    with pytest.raises(UserError, match="expected 5 bytes"):
        journal.resume(tmp_path, FINGERPRINT)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": {}, "parts": {"a": 1}}', '{"fingerprint":'])
def test_a_damaged_journal_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / journal.NAME).write_text(text)
    with pytest.raises(UserError, match="--force"):
        journal.resume(tmp_path, FINGERPRINT)


def test_a_journal_does_not_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run.partial"
    folder.mkdir()
    (tmp_path / "other").write_bytes(b"12345")
    made = journal.begin(folder, FINGERPRINT)
    made.commit("block 0", {**RECORD, "file": "../other"})
    with pytest.raises(UserError, match="expected 5 bytes"):
        journal.resume(folder, FINGERPRINT)


def test_a_finished_run_needs_no_parts_any_more(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.note(finished=True)
    (tmp_path / "part-0").unlink()
    assert journal.resume(tmp_path, FINGERPRINT).finished


def test_every_flipped_byte_is_noticed_and_nothing_is_lost(tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / journal.NAME
    content = path.read_bytes()
    chooser = random.Random(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"journal\.json") as caught:
            journal.resume(tmp_path, FINGERPRINT)
        assert "--force" in str(caught.value)
        assert (tmp_path / "part-0").read_bytes() == CONTENT
    # What the sentence advises works.
    path.write_bytes((tmp_path / journal.COPY).read_bytes())
    assert list(journal.resume(tmp_path, FINGERPRINT).parts) == ["block 0"]
