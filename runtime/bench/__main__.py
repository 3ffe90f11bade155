"""The commands of `python -m runtime.bench`."""

import typer

from runtime.bench.commands import decode, digest, kernels, load, speculate, verify
from runtime.bench.fleet_command import fleet
from runtime.bench.gpu_commands import app as gpu
from runtime.bench.http_command import http

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)
for command in (kernels, decode, verify, speculate, load, http, fleet, digest):
    app.command()(command)
app.add_typer(gpu, name="gpu")

if __name__ == "__main__":
    app()
