import gzip
import json
import os
import platform
import subprocess
import sys

import pytest

from calib.corpora import load, parse_dataset_name
from calib.errors import UserError
from calib.sources import is_held_out, standard_library

LONG = "The quick brown fox jumps over the lazy dog. "


def test_default_is_the_held_out_part_of_the_standard_library() -> None:
    corpus = load(None)
    held_out = [text for path, text in standard_library() if is_held_out(path)]
    trained_on = [text for path, text in standard_library() if not is_held_out(path)]
    assert list(corpus.documents) == held_out
    assert not set(held_out) & set(trained_on)
    assert corpus == load("stdlib")
    assert corpus.python == platform.python_version()
    assert os.sep not in corpus.name


def test_text_files_and_directories(tmp_path) -> None:
    (tmp_path / "b.md").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first é", encoding="utf-8")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.py").write_text("third = 3\n")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    assert load(str(tmp_path / "a.txt")).documents == ("first é",)
    corpus = load(str(tmp_path))
    assert corpus.documents == ("first é", "second", "third = 3\n")
    assert corpus.empty == 1
    assert corpus.name == tmp_path.name
    assert corpus.python is None
    assert corpus.sha256 != load(str(tmp_path / "a.txt")).sha256


def test_sha256_is_of_documents_not_of_their_concatenation(tmp_path) -> None:
    digests = []
    for name, texts in (("a", ["ab", "c"]), ("b", ["a", "bc"])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        digests.append(load(str(path)).sha256)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_jsonl_fields(tmp_path, suffix) -> None:
    rows = [
        {"text": "one", "prompt": "no"},
        {"prompt": "two", "content": "no"},
        {"turns": ["three", "no"]},
        {"content": "four"},
    ]
    raw = "\n\n".join(map(json.dumps, rows)).encode()
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    corpus = load(str(path))
    assert corpus.documents == ("one", "two", "three", "four")
    assert not corpus.are_prompts
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(rows[1]) + "\n" + json.dumps(rows[2]))
    assert load(str(path)).are_prompts


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json", "expected one JSON object"),
        (b"[1, 2]", "found list"),
        (b'{"body": "x"}', "found body"),
        (b'{"text": 3}', "found int"),
        (b'{"turns": []}', "found list"),
        (b'{"text": "\xff"}', "expected one JSON object"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, says) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2") as raised:
        load(str(path))
    assert says in str(raised.value)


def test_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": [1, 2], "text": ["first", "second"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert load(str(tmp_path / "rows.parquet")).documents == ("first", "second")
    parquet.write_table(table.rename_columns(["id", "body"]), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="expected a column named text, found id, body"):
        load(str(tmp_path / "other.parquet"))
    raw = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=r"cut\.parquet is not a readable Parquet file"):
        load(str(tmp_path / "cut.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"specpress\[data\]"):
        load(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("latin.txt", b"caf\xe9", "expected UTF-8 text, found byte 0xe9 at offset 3"),
        ("blank.txt", b" \n\t", "holds no text"),
        ("data.csv", b"a,b", "expected a file that ends in"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-6], "check that it is complete"),
        ("half.jsonl", b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_unreadable_files(tmp_path, name, raw, says) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / name))


def test_missing_sources(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match="does not exist"):
        load("gone.jsonl")
    with pytest.raises(UserError, match="has no file that ends in"):
        load(str(tmp_path))


def test_dataset_names() -> None:
    assert parse_dataset_name("wikitext") == ("wikitext", None, "train")
    assert parse_dataset_name("a/b:test") == ("a/b", None, "test")
    assert parse_dataset_name("wikitext:raw-v1") == ("wikitext", "raw-v1", "train")
    assert parse_dataset_name("wikitext:raw-v1:test") == ("wikitext", "raw-v1", "test")
    assert parse_dataset_name("c4:en:train[:1%]") == ("c4", "en", "train[:1%]")
    assert parse_dataset_name("c4:train[10:20]") == ("c4", None, "train[10:20]")
    for wrong in ("a::b", ":a", "a:b:c:d"):
        with pytest.raises(UserError, match="correct it"):
            parse_dataset_name(wrong)


def test_a_dataset_that_cannot_be_loaded_is_one_sentence(tmp_path) -> None:
    pytest.importorskip("datasets")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "import calib.corpora as c\ntry: c.load('nobody/nothing:test')\nexcept c.UserError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "nobody/nothing:test is no file here, and as the dataset nobody/nothing:test it cannot"
    )
    assert done.stdout.count("\n") == 1


def test_a_dataset_on_this_machine(tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"id": [0, 1, 2], "text": [LONG, "", "two"]})
    asked = []
    # The real rows, without the hub that would serve them.
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    corpus = load("someone/some-text:en:test")
    assert asked == [(("someone/some-text", "en"), {"split": "test"})]
    assert corpus.documents == (LONG, "two")
    assert corpus.empty == 1
    assert corpus.name == "someone/some-text:en:test"


def test_importing_corpora_is_light() -> None:
    code = (
        "import sys, calib.corpora; print([m for m in ('torch', 'datasets', 'pyarrow', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
