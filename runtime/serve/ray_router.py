"""Ray Serve's router of the engines: by what each knows of a text's beginning, within the bounds of load."""

from time import monotonic
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from runtime.serve.prefixes import UNKNOWN_PAGES, Kept, ranked

_ON_ITS_WAY = 2.0  # seconds after which a text that reached no replica is taken for given up


class PrefixRouter(RequestRouter):
    """Texts that were begun go to replicas of the same fingerprint alone."""

    def initialize_state(self, balance: float = 1.25) -> None:
        """See Ray Serve."""
        self._balance = balance
        self._kept: dict[ReplicaID, Kept] = {}
        self._load: dict[ReplicaID, set[str]] = {}
        self._spent: dict[ReplicaID, int] = {}
        self._told: dict[ReplicaID, int] = {}
        # Of a text that is on its way: where it goes, and since when.
        self._chosen: dict[str, tuple[ReplicaID, float]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See Ray Serve: forgets those that are gone."""
        super().update_replicas(replicas)
        there = {one.replica_id for one in replicas}
        for book in (self._kept, self._load, self._spent, self._told):
            for gone in book.keys() - there:
                del book[gone]  # type: ignore[attr-defined]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See Ray Serve: each in a rank of its own. Empty where none may go on with the text: it waits."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked = pending_request.kwargs
        wanted = asked.get("fingerprint", "")
        fit = [
            one for one in candidate_replicas if not wanted or one.replica_metadata.get("fingerprint", wanted) == wanted
        ]
        pages = asked.get("pages", ())
        for one in fit:
            self._learn(one)
        ids = [one.replica_id for one in fit]
        order = ranked(
            [self._of(id_).known(pages) for id_ in ids],
            len(pages),
            self._loads(ids, pending_request.metadata.internal_request_id),
            [self._spent.get(id_, 0) for id_ in ids],
            self._balance,
        )
        if ids:
            # At once: the next text, which may begin alike, is looked at before this one is there.
            best = ids[order[0]]
            self._chosen[pending_request.metadata.internal_request_id] = best, monotonic()
            self._spent[best] = self._spent.get(best, 0) + max(1, len(pages) - self._of(best).known(pages))
            self._of(best).use(pages)
        return [[fit[place]] for place in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See Ray Serve."""
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        self._load.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)
        self._of(replica_id).use(pending_request.kwargs.get("pages", ()))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See Ray Serve."""
        self._load.get(replica_id, set()).discard(internal_request_id)

    def _loads(self, ids: list[ReplicaID], asked: str) -> list[int]:
        """Texts that each writes, and those on their way to it, but for the one that is asked about."""
        late = monotonic() - _ON_ITS_WAY
        self._chosen = {name: one for name, one in self._chosen.items() if one[1] > late and name != asked}
        coming = [replica for replica, _ in self._chosen.values()]
        return [len(self._load.get(id_, ())) + coming.count(id_) for id_ in ids]

    def _of(self, replica: ReplicaID) -> Kept:
        return self._kept.setdefault(replica, Kept())

    def _learn(self, replica: RunningReplica) -> None:
        """What the replica tells of itself, where it says something new: the ingress may have been started again."""
        stats, kept = replica.routing_stats, self._of(replica.replica_id)
        kept.room = int(replica.replica_metadata.get("pages") or UNKNOWN_PAGES)
        turn = int(stats.get("turn", 0))
        if turn != self._told.get(replica.replica_id, 0):
            self._told[replica.replica_id] = turn
            kept.learn(stats.get("digests", ()))
