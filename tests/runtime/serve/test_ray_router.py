"""The router's books: texts on their way count, wherever they end, and whoever gives up is forgotten."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from runtime.serve import ray_router
from runtime.serve.ray_router import PrefixRouter

ONE, TWO = (ReplicaID(name, DeploymentID("engine")) for name in ("one", "two"))
REPLICAS: Any = [SimpleNamespace(replica_id=id_, replica_metadata={}, routing_stats={}) for id_ in (ONE, TWO)]


@pytest.fixture
def router() -> PrefixRouter:
    """One that no cluster runs."""
    found = PrefixRouter.__new__(PrefixRouter)
    found.initialize_state()
    return found


def _choose(router: PrefixRouter, name: str, *pages: bytes) -> tuple[PendingRequest, ReplicaID]:
    async def chosen() -> tuple[PendingRequest, ReplicaID]:
        asked = PendingRequest([], {"pages": pages}, RequestMetadata(name, name))
        [best], *_ = await router.choose_replicas(REPLICAS, asked)
        return asked, best.replica_id

    return asyncio.run(chosen())


def test_texts_that_come_at_once_go_to_a_replica_each(router: PrefixRouter) -> None:
    """Though one replica has read more so far, and neither has any of them yet."""
    first, one = _choose(router, "a", *(bytes([page]) for page in range(9)))
    router.on_request_routed(first, one, None)
    router.on_request_completed(one, "a")
    at_once = [_choose(router, name) for name in "bcde"]
    assert one == ONE and [best for _, best in at_once] == [TWO, ONE, TWO, ONE]
    # Asking again for one that waits does not count it twice.
    assert _choose(router, "e")[1] == ONE
    # Two of them end, both of the same replica: it gets the next two.
    for asked, best in at_once:
        router.on_request_routed(asked, best, None)
    for name in "bd":
        router.on_request_completed(TWO, name)
    assert [_choose(router, name)[1] for name in "fg"] == [TWO, TWO]


def test_a_text_counts_where_it_went_and_is_forgotten_where_it_went_nowhere(
    router: PrefixRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, best = _choose(router, "a")
    router.on_request_routed(asked, TWO, None)  # another one was asked first
    assert best == ONE and _choose(router, "b")[1] == ONE
    for name in "cdefgh":  # whose clients went away
        _choose(router, name)
    monkeypatch.setattr(ray_router, "monotonic", lambda: 1e9)
    assert router._loads([ONE, TWO], "i") == [0, 1]
