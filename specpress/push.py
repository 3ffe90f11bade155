"""`specpress push`: a run becomes a repository of the Hugging Face hub, with a model card.

The model's files come to the top, where `from_pretrained` looks for them; draft/, medusa/, the report, the recipe and
the manifest lie beside them.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback
from runtime.files import regular
from specpress.report import find_run

if TYPE_CHECKING:
    from compress.artifact import Artifact

_BESIDE = ("report.html", "report.md", "report.json", "recipe.yaml", "manifest.json")
_FOLDERS = ("draft", "medusa", "block")


def command(
    run: Annotated[str, typer.Argument(help="Run folder.")],
    repo: Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME. It is made where there is none.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and print the card; upload nothing.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    token: Annotated[
        str | None, typer.Option(help="Token of the hub.", show_default="HF_TOKEN, else that of `hf auth login`")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The base model's name on the hub.", show_default="the report's, if it is one")
    ] = None,
    license_: Annotated[
        str | None,
        typer.Option("--license", help="The base model's license.", show_default="as model/README.md has it"),
    ] = None,
) -> None:
    """Uploads a finished run to the Hugging Face hub, with a model card made of its report."""
    with without_traceback(USER_ERRORS):
        _check_name(repo)
        artifact = find_run(run)
        artifact.verify()
        card = _card(artifact, repo, base_model, license_)
        files = listed(artifact)
        if dry_run:
            for name, path in files.items():
                typer.echo(f"{path.stat().st_size:>15,}  {name}")
            typer.echo(f"{len(card.encode()):>15,}  README.md\n\n{card}", nl=False)
        else:
            typer.echo(_upload(files, card, repo, private, token))


def listed(artifact: "Artifact") -> dict[str, Path]:
    """Every file by its name in the repository, but for the card."""
    run = artifact.path
    found = {path.relative_to(artifact.model).as_posix(): path for path in _files(artifact.model)}
    beside = [path for folder in _FOLDERS for path in _files(run / folder)]
    beside += [run / name for name in _BESIDE if (run / name).is_file()]
    found |= {path.relative_to(run).as_posix(): path for path in beside}
    found.pop("README.md", None)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{repo}: expected OWNER/NAME of a repository ({str(error).rstrip('.')}): correct it") from None
    if "/" not in repo:
        raise UserError(f"{repo}: expected OWNER/NAME of a repository, found no owner: write it in front")


def _card(artifact: "Artifact", repo: str, base: str | None, license_: str | None) -> str:
    from compress.report.files import read_report
    from specpress.model_card import model_card, read_license

    text = regular(artifact.path / "report.md").read_text(encoding="utf-8")
    config = json.loads((artifact.model / "config.json").read_text(encoding="utf-8"))
    return model_card(read_report(artifact.path), config, repo, text, base, license_ or read_license(artifact.model))


def _upload(files: Mapping[str, Path], card: str, repo: str, private: bool, token: str | None) -> str:
    """Uploads everything in one commit; returns the repository's address.

    Raises UserError without a token, and for what the hub refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError

    token = token or get_token()
    if token is None:
        raise UserError("no token of the hub was found: give --token, set HF_TOKEN, or run `hf auth login`")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        # Links in the layout of the repository: nothing is copied.
        for name, path in files.items():
            place = Path(folder, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())
        Path(folder, "README.md").write_text(card, encoding="utf-8")
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a Specpress run")
        except (HTTPError, ConnectionError) as error:  # the hub's refusals are HTTPErrors, too
            reason = str(error).strip().splitlines()[-1].rstrip(".")
            raise UserError(
                f"{repo} cannot be uploaded to {api.endpoint} ({reason}): correct that and try again"
            ) from error
    return str(address)
