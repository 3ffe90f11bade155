"""Who gets a text: the replica that knows the most of its beginning, unless it has much more to do than the others.

A beginning is known by its pages: 64 tokens each, every one named by a digest of itself and all before it, as the
engine's cache has them. Bounded loads: consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018.
"""

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

PAGE = 64  # tokens
MOST_TOLD = 2048  # digests that a replica tells of itself
_UNKNOWN_PAGES = 4096  # what a replica is held to keep that has not told its pages


def page_digests(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """8 bytes for each whole page of 64 tokens: of it, all before it and the cache's salt."""
    out, before = [], hashlib.blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = array("q", tokens[start : start + PAGE]).tobytes()
        before = hashlib.blake2b(before + page, digest_size=8).digest()
        out.append(before)
    return out


@dataclass
class Kept:
    """The pages that a replica's cache should hold: the last ones used, as many as it has room for."""

    room: int = _UNKNOWN_PAGES
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def known(self, pages: Sequence[bytes]) -> int:
        """Of these, how many from the first on."""
        return next((place for place, page in enumerate(pages) if page not in self.pages), len(pages))

    def use(self, pages: Iterable[bytes]) -> None:
        """They are read, or read again, now. The first pages of a text are dropped last."""
        for page in reversed(list(pages)):
            self.pages[page] = None
            self.pages.move_to_end(page)
        while len(self.pages) > self.room:
            self.pages.popitem(last=False)

    def learn(self, pages: Iterable[bytes]) -> None:
        """They are there, too: somebody else had them read."""
        for page in pages:
            if page not in self.pages:
                self.pages[page] = None
                self.pages.move_to_end(page, last=False)
        while len(self.pages) > self.room:
            self.pages.popitem(last=False)


def ranked(known: Sequence[int], load: Sequence[int], spent: Sequence[int], balance: float) -> list[int]:
    """Places of replicas, the best first.

    known    pages of the text that each holds; load: texts that it writes; spent: pages that it read so far.
    balance  a replica whose load, with this text, exceeds so many times the mean comes after those that stay below.
    """
    bound = math.ceil(balance * (sum(load) + 1) / max(1, len(load)))
    order = range(len(load))
    return sorted(order, key=lambda place: (load[place] + 1 > bound, -known[place], load[place], spent[place]))


class PrefixRouter(RequestRouter):
    """Ray Serve's router of the engines. Texts that were begun go to replicas of the same fingerprint alone."""

    def initialize_state(self, balance: float = 1.25) -> None:
        """See Ray Serve."""
        self._balance = balance
        self._kept: dict[ReplicaID, Kept] = {}
        self._load: dict[ReplicaID, set[str]] = {}
        self._spent: dict[ReplicaID, int] = {}
        self._told: dict[ReplicaID, int] = {}

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
            one
            for one in candidate_replicas
            if not wanted or one.replica_metadata.get("fingerprint", wanted) == wanted
        ]
        pages = asked.get("pages", ())
        for one in fit:
            self._learn(one)
        ids = [one.replica_id for one in fit]
        order = ranked(
            [self._of(id_).known(pages) for id_ in ids],
            [len(self._load.get(id_, ())) for id_ in ids],
            [self._spent.get(id_, 0) for id_ in ids],
            self._balance,
        )
        if ids and pages:
            # At once: the next text, which may begin alike, is looked at before this one is on its way.
            best = ids[order[0]]
            self._spent[best] = self._spent.get(best, 0) + len(pages) - self._of(best).known(pages)
            self._of(best).use(pages)
        return [[fit[place]] for place in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See Ray Serve."""
        self._load.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)
        self._of(replica_id).use(pending_request.kwargs.get("pages", ()))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See Ray Serve."""
        self._load.get(replica_id, set()).discard(internal_request_id)

    def _of(self, replica: ReplicaID) -> Kept:
        return self._kept.setdefault(replica, Kept())

    def _learn(self, replica: RunningReplica) -> None:
        """What the replica tells of itself, where it says something new: the ingress may have been started again."""
        stats, kept = replica.routing_stats, self._of(replica.replica_id)
        kept.room = int(replica.replica_metadata.get("pages") or _UNKNOWN_PAGES)
        turn = int(stats.get("turn", 0))
        if turn != self._told.get(replica.replica_id, 0):
            self._told[replica.replica_id] = turn
            kept.learn(stats.get("digests", ()))
