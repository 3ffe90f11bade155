"""Where the embedded pair is: a small target and its draft, which runs without --model take."""

from pathlib import Path

from compress.errors import UserError


def default_pair() -> tuple[Path, Path]:
    """The target's and the draft's directory: in the installed package, else in the checkout's examples.

    Raises UserError where neither has them.
    """
    package = Path(__file__).parent
    for folder in (package / "_pair", package.parent / "examples" / "pair"):
        target, draft = folder / "target", folder / "draft"
        if (target / "config.json").is_file() and (draft / "config.json").is_file():
            return target, draft
    raise UserError("the embedded pair is not installed: name a model with --model")
