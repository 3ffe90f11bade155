"""lm-eval's own command with the model class `specpress`.

python -m compress.tasks run --model specpress --model_args pretrained=runs/nf4,cache=int8 --tasks TASK
"""

import typer

from compress.errors import USER_ERRORS, UserError
from runtime.cli import without_traceback

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


# lm-eval reads the command line itself, --help included.
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def main() -> None:
    """Registers the class, and hands the command line to lm-eval."""
    with without_traceback(USER_ERRORS):
        try:
            from lm_eval.__main__ import cli_evaluate
        except ImportError as error:
            raise UserError("compress.tasks needs lm-eval: pip install 'specpress[eval]'") from error
        import compress.tasks.model  # noqa: F401 (registers)

        cli_evaluate()


if __name__ == "__main__":
    app()
