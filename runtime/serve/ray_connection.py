"""A Ray cluster that this process uses: found, or started on this machine, and let go of. Ray is the extra `ray`."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from runtime.errors import UserError

LOCAL = "local"
_OBJECTS = 200_000_000  # bytes of the object store of a cluster of our own: what travels is small, or in pieces
_SERVING = ("fastapi", "uvicorn", "prometheus_client", "llguidance")


def require_ray(serving: bool = False) -> None:
    """Raises UserError where the extra `ray` is not installed; `serving`: or what its HTTP interface needs."""
    missing = [name for name in ("ray", *(_SERVING if serving else ())) if find_spec(name) is None]
    if missing:
        raise UserError(f"a cluster needs {', '.join(missing)}: pip install 'specpress[ray]'")


@contextmanager
def connected(address: str, **local: Any) -> Iterator[None]:
    """This process is connected to the cluster meanwhile.

    address  "auto": of the node that runs on this machine; HOST:PORT or ray://HOST:PORT; "local": a cluster of this
             machine alone, started with the settings in `local` (as ray.init has them), which ends with the block.

    Raises UserError where no cluster answers, or Ray is not installed.
    """
    require_ray()
    import ray

    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": _OBJECTS, **local}
    if ray.is_initialized():  # by whoever calls, who also lets go of it
        yield
        return
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address!r} ({first_line(error)}): start one with ray start --head, or give"
            f" the address {LOCAL}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def first_line(error: Exception) -> str:
    """What an error says, as far as it fits into a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
