"""The commands of `python -m runtime.bench`."""

import typer

from runtime.bench.gpu.__main__ import app as gpu
from runtime.bench.serving import load, speculate
from runtime.bench.timing import decode, kernels, verify

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
for command in (kernels, decode, verify, speculate, load):
    app.command()(command)
app.add_typer(gpu, name="gpu")

if __name__ == "__main__":
    app()
