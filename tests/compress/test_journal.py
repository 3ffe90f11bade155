"""The journal: what it lists is on disk, and it goes on only with what it was started with."""

import json
from pathlib import Path

import pytest

from compress import journal
from compress.errors import UserError

FINGERPRINT = {"recipe": {"name": "nf4", "stages": [{"scheme": "nf4"}]}, "seed": 3, "files": {"a": 1}}


def begun(folder: Path) -> journal.Journal:
    made = journal.begin(folder, FINGERPRINT)
    (folder / "part-0").write_bytes(b"12345")
    made.commit("block 0", {"file": "part-0", "bytes": 5, "layers": [{"error": 0.125}]})
    return made


def test_resume_gives_back_what_was_committed(tmp_path: Path) -> None:
    made = begun(tmp_path)
    again = journal.resume(tmp_path, json.loads(json.dumps(FINGERPRINT)))
    assert again.parts == made.parts
    again.commit("block 1", {"file": "part-0", "bytes": 5, "layers": []})
    assert list(journal.resume(tmp_path, FINGERPRINT).parts) == ["block 0", "block 1"]
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
    made.commit("block 0", {"file": "../other", "bytes": 5, "layers": []})
    with pytest.raises(UserError, match="expected 5 bytes"):
        journal.resume(folder, FINGERPRINT)
