"""The application on Ray Serve: the server's own HTTP app as ingress, engines as replicas behind it.

The ingress listens itself: Ray's HTTP proxy in front of it would pass every piece of a text through one process more.
`specpress cluster up CONFIG` runs it, and so does `serve run FILE` with the file that `specpress cluster file` writes.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from runtime.errors import UserError
from runtime.serve.app import Service
from runtime.serve.guard import Guard
from runtime.serve.metrics import Meter, Registry
from runtime.serve.models import Models
from runtime.serve.ray_config import ClusterConfig
from runtime.serve.ray_engine import EngineReplica
from runtime.serve.ray_front import RayFront
from runtime.serve.ray_router import PrefixRouter
from runtime.serve.server import Server, http_config, listening
from runtime.serve.settings import Access, ModelSettings, PageSettings
from runtime.serve.vocabulary import read_template

_HEAD = "node:__internal_head__"  # Ray's own resource of the node where its controller is
_TICK = 1.0  # seconds
_STATS = 1.0  # seconds between two times that replicas tell what they hold
_FREE = 60.0  # seconds in which an ingress that goes has to let go of the port
_DRAIN = 5.0  # seconds that an ingress takes to end, beside those that its texts have


class Ingress:
    """OpenAI's HTTP interface in front of the replicas: one, on the head node, beside Ray's own controller."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, told: Mapping[str, Any], engines: DeploymentHandle
    ) -> None:
        config = ClusterConfig.of(dict(told), "the cluster's file")
        logging.basicConfig(level=logging.WARNING)

        def front(settings: ModelSettings, meter: Meter) -> RayFront:
            if settings != config.model:
                raise UserError("a cluster serves the model of its file: change that, and run it again")
            return RayFront(settings, meter, engines, config)

        registry = Registry()
        template = None if config.chat_template is None else read_template(config.chat_template)
        self._models = Models(registry, config.limits, template, front)
        service = Service(self._models, registry, config.limits, config.model, PageSettings())
        await self._models.load(config.model)
        self._server = Server(http_config(Guard(service.app(), config.access)), service, config.limits.drain)
        self._serving = asyncio.create_task(self._server.serve([await _listening(config.access)]))
        self._ticking = asyncio.create_task(self._ticks())

    def check_health(self) -> None:
        """See Ray Serve. Raises where nobody listens any more: Ray then starts another ingress."""
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self._models.tick()

    async def __del__(self) -> None:
        if hasattr(self, "_ticking"):
            self._server.end()
            await self._serving
            self._ticking.cancel()
            await self._models.close()


async def _listening(access: Access) -> socket.socket:
    """A socket that listens. Raises UserError where another one keeps the port, and not just an ingress that goes."""
    end = time.monotonic() + _FREE
    while True:
        try:
            return listening(access)
        except UserError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)


def build(told: Mapping[str, Any]) -> Application:
    """The application of a cluster's file, as plain data: what `serve run` calls. Raises UserError."""
    return application(ClusterConfig.of(dict(told), "args"))


def application(config: ClusterConfig, engine: type[EngineReplica] = EngineReplica) -> Application:
    """The ingress, bound to the engines."""
    engines = serve.deployment(engine, name="engine").options(**engine_options(config))
    bound = engines.bind(config.model, config.stall)
    ingress = serve.deployment(Ingress, name="ingress").options(
        num_replicas=1,
        graceful_shutdown_timeout_s=config.limits.drain + _DRAIN,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
    )
    return ingress.bind(config.model_dump(mode="json"), bound)


def engine_options(config: ClusterConfig) -> dict[str, Any]:
    """What Ray Serve is told of the engines."""
    replicas = config.replicas
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": replicas.cpus,
            "num_gpus": replicas.gpus,
            "resources": dict(replicas.resources),
        },
        "max_replicas_per_node": replicas.per_node,
        # What a replica takes at once; its engine takes max_batch into one forward, so nothing waits twice.
        "max_ongoing_requests": config.max_batch,
        # How many wait is the admission's to say. Ray counts those on their way, too, and would refuse a burst that
        # idle replicas could take.
        "max_queued_requests": -1,
        "graceful_shutdown_timeout_s": replicas.leave,
        "graceful_shutdown_wait_loop_s": 1.0,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
    }
    if config.routing.prefix:
        options["request_router_config"] = {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"balance": config.routing.balance},
            "request_routing_stats_period_s": _STATS,
        }
    if replicas.most == replicas.least:
        return options | {"num_replicas": replicas.least}
    return options | {
        "autoscaling_config": {
            "min_replicas": replicas.least,
            "max_replicas": replicas.most,
            "initial_replicas": replicas.least,
            "target_ongoing_requests": replicas.texts or math.ceil(config.max_batch / 2),
            "upscale_delay_s": replicas.up_after,
            "downscale_delay_s": replicas.down_after,
            "metrics_interval_s": 1.0,
            "look_back_period_s": min(5.0, max(1.0, replicas.up_after)),
        }
    }


def serve_file(config: ClusterConfig) -> dict[str, Any]:
    """What `serve run` and `serve deploy` take, as YAML would say it."""
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "specpress",
                "route_prefix": None,
                "import_path": "runtime.serve.ray_app:build",
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }
