"""`specpress cluster`: the engines of one file as replicas on a Ray cluster."""

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback
from runtime.errors import UserError
from runtime.serve.ray_connection import LOCAL, connected, first_line, require_ray

if TYPE_CHECKING:
    from runtime.serve.ray_config import ClusterConfig

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    help="Serve one model by replicas on a Ray cluster, which survive the loss of machines. See docs/scale.md.",
)  # fmt: skip
Config = Annotated[Path, typer.Argument(help="The cluster's YAML file.", show_default=False)]
APPLICATION = "specpress"


@app.command()
def up(
    config: Config,
    detach: Annotated[bool, typer.Option("--detach", help="End the command, and leave the application there.")] = False,
) -> None:
    """Starts the application on the cluster at the file's `address`, and says where it answers.

    Ctrl-C or SIGTERM takes it away again. Nodes join beforehand or later: ray start --head on the first machine, and
    ray start --address HOST:6379 on each other one, with --resources where the file names some.
    """
    with without_traceback():
        told = _read(config)
        if detach and told.address == LOCAL:
            raise UserError("--detach: a cluster with address: local ends with the command; leave one of the two out")
        with connected(told.address, resources=dict(told.replicas.resources)):
            _note_missing(told)
            address = run_application(told)
            typer.echo(f"ready: {address}")
            if not detach:
                _wait_for_signal()
                remove_application()


@app.command()
def down(config: Config) -> None:
    """Takes the application away from the cluster; texts in flight end with an error."""
    with without_traceback():
        told = _read(config)
        with connected(told.address):
            remove_application()


@app.command()
def file(config: Config) -> None:
    """Prints the file for Ray's own command: specpress cluster file CONFIG > serve.yaml && serve run serve.yaml."""
    with without_traceback():
        told = _read(config)
        import yaml

        from runtime.serve.ray_app import serve_file

        typer.echo(yaml.safe_dump(serve_file(told), sort_keys=False), nl=False)


def run_application(told: "ClusterConfig") -> str:
    """Runs the application on the cluster that this process is connected to; its address, once it answers.

    Raises UserError where no replica starts.
    """
    from ray import serve

    from runtime.serve.ray_app import application

    serve.start(proxy_location="Disabled")
    try:
        serve.run(application(told), name=APPLICATION, route_prefix=None, logging_config={"enable_access_log": False})
    except RuntimeError as error:
        raise UserError(
            f"the application does not start ({first_line(error)}): `serve status` and Ray's logs say more"
        ) from None
    return f"http://{told.host}:{told.port}"


def _note_missing(told: "ClusterConfig") -> None:
    """Says what the command waits for, where no node of the cluster has it yet."""
    import ray

    there = ray.cluster_resources()
    missing = [name for name, count in told.replicas.resources.items() if there.get(name, 0) < count]
    if missing:
        typer.echo(
            f"note: no node of the cluster has {', '.join(missing)} yet, which a replica needs: waiting", err=True
        )


def remove_application() -> None:
    """Takes the application away, and Ray Serve with it where nothing else runs on it."""
    from ray import serve

    serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def _read(config: Path) -> "ClusterConfig":
    from runtime.serve.ray_config import ClusterConfig

    require_ray(serving=True)
    return ClusterConfig.load(config)


def _wait_for_signal() -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
