"""The manifest: every file by its checksum, and nothing that differs between equal runs."""

from pathlib import Path

import pytest

from compress.artifact import manifest
from compress.errors import USER_ERRORS, UserError

ABOUT = {"recipe": "nf4", "seed": 1}


def folder(root: Path, name: str = "run") -> Path:
    made = root / name
    (made / "model").mkdir(parents=True)
    (made / "draft" / "deep").mkdir(parents=True)
    (made / "recipe.yaml").write_text("name: nf4\n")
    (made / "model" / "config.json").write_text("{}")
    (made / "draft" / "deep" / "x.bin").write_bytes(bytes(range(256)))
    (made / "report.json").write_text("not covered")
    manifest.write(made, ABOUT)
    return made


def test_lists_model_draft_and_recipe(tmp_path: Path) -> None:
    files = manifest.read(folder(tmp_path))["files"]
    assert sorted(files) == ["draft/deep/x.bin", "model/config.json", "recipe.yaml"]
    assert files["model/config.json"] == {
        "bytes": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }


def test_equal_runs_are_equal_bytes(tmp_path: Path) -> None:
    one, other = folder(tmp_path, "one"), folder(tmp_path, "other")
    assert (one / manifest.NAME).read_bytes() == (other / manifest.NAME).read_bytes()


def test_verify_names_what_differs(tmp_path: Path) -> None:
    run = folder(tmp_path)
    manifest.verify(run)
    (run / "model" / "config.json").write_text("{ }")
    with pytest.raises(UserError, match=r"config\.json has changed"):
        manifest.verify(run)
    (run / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing"):
        manifest.verify(run)
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "more").write_text("")
    with pytest.raises(UserError, match="more is unlisted"):
        manifest.verify(run)


def test_only_run_folders_count(tmp_path: Path) -> None:
    assert manifest.is_run_folder(folder(tmp_path))
    (tmp_path / "web").mkdir()
    assert not manifest.is_run_folder(tmp_path / "web")
    # A web application's manifest has the same name.
    (tmp_path / "web" / manifest.NAME).write_text('{"name": "app", "icons": []}')
    assert not manifest.is_run_folder(tmp_path / "web")
    (tmp_path / "web" / manifest.NAME).write_text("{")
    with pytest.raises(USER_ERRORS, match="is not valid JSON"):
        manifest.read(tmp_path / "web")


def test_versions_name_what_is_installed() -> None:
    found = manifest.versions()
    assert {"python", "torch", "transformers", "safetensors"} <= found.keys()
