"""A replica that runs other kernels on nodes that have the resource `other`: as machines of another kind would."""

from dataclasses import replace

import ray

from runtime.serve.ray_engine import EngineReplica
from runtime.serve.settings import ModelSettings


class Unequal(EngineReplica):
    """Portable kernels there, the fastest elsewhere."""

    async def __init__(self, settings: ModelSettings, stall: float) -> None:
        here = ray.get_runtime_context().get_node_id()
        node = next(one for one in ray.nodes() if one["NodeID"] == here)
        kernels = "avx2" if "other" in node["Resources"] else "auto"
        await super().__init__(replace(settings, kernels=kernels), stall)
