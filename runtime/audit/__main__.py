"""`python -m runtime.audit` and `specpress audit`: whether speculation is lossless, of any engine."""

from pathlib import Path
from typing import Annotated

import typer

from runtime.audit.options import CertificateOptions, EngineOptions, OursOptions
from runtime.cli import takes, without_traceback
from runtime.errors import UserError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    certificate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The same as `certificate RUN`.", show_default=False)
    ] = None,
) -> None:
    """Audits engines whose speculation is called lossless. Exit code 0: lossless, 1: differs or cannot tell."""
    if certificate is None:
        return
    with without_traceback():
        if context.invoked_subcommand is not None:
            raise UserError(f"--certificate is a command of its own: leave {context.invoked_subcommand} out")
        from runtime.audit.certificate_command import repeat_certificate

        repeat_certificate(CertificateOptions(run=certificate))


@app.command()
def model(
    folder: Annotated[Path, typer.Argument(help="A folder that is not there yet.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 7,
) -> None:
    """Writes a tiny model of known distributions and a draft for it, as safetensors and GGUF, for engines to run."""
    with without_traceback():
        from runtime.audit.command import write_model

        write_model(folder, seed)


@takes(EngineOptions)
def engine(options: EngineOptions) -> None:
    """Audits an engine by its URL (OpenAI's /v1/completions) or a Python function. See docs/audit.md."""
    from runtime.audit.command import audit_engine

    audit_engine(options)


@takes(OursOptions)
def ours(options: OursOptions) -> None:
    """Compares this project's drafters with plain decoding over many settings, token by token."""
    from runtime.audit.ours_command import audit_ours

    audit_ours(options)


@takes(CertificateOptions)
def certificate(options: CertificateOptions) -> None:
    """Repeats what a run's lossless certificate says, on this machine, and says what differs."""
    from runtime.audit.certificate_command import repeat_certificate

    repeat_certificate(options)


app.command()(engine)
app.command()(ours)
app.command()(certificate)

if __name__ == "__main__":
    app(prog_name="python -m runtime.audit")
