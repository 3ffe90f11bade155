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

PAGE = 64  # tokens
MOST_TOLD = 2048  # digests that a replica tells of itself
UNKNOWN_PAGES = 4096  # what a replica is held to keep that has not told its pages
_AHEAD = 2  # texts that a replica counts for which has read one beginning more than others


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

    room: int = UNKNOWN_PAGES
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


def ranked(known: Sequence[int], pages: int, load: Sequence[int], spent: Sequence[int], balance: float) -> list[int]:
    """Places of replicas, the best first.

    known    of the text's `pages` those that each holds; load: texts that it writes; spent: pages that it read so far.
    balance  a replica whose load, with this text, exceeds so many times the mean, and one text more, comes after those
             that stay below. Among few texts one more is no imbalance; to read a long beginning elsewhere costs more.

    A beginning that nobody holds stays where it is read first, and so do the texts that follow: who has read more than
    others by such a beginning counts as if it wrote more texts.
    """
    bound = math.ceil(balance * (sum(load) + 1) / max(1, len(load))) + 1
    least = min(spent, default=0)

    def order(place: int) -> tuple[bool, int, float, int]:
        ahead = (spent[place] - least) / pages if pages and not known[place] else 0.0
        return load[place] + 1 > bound, -known[place], load[place] + min(_AHEAD * ahead, _AHEAD), spent[place]

    return sorted(range(len(load)), key=order)
