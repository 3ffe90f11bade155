"""Who holds which page of a paged cache, and which full pages are known by their tokens. Numbers only, no keys.

A page is free, held by one or more requests, or idle: held by none but known, so that a request with the same tokens
may still take it over. Idle pages are taken when no free one is left, the one that was let go first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from runtime.errors import OutOfPages
from runtime.kv_store import KEY_BLOCK

# The prefix of no tokens.
ROOT = 0


@dataclass(frozen=True)
class Prefix:
    """What a known page holds: the 64 tokens (int64 bytes) that follow the prefix numbered `parent`.

    Of a text's first page `salt` is part of the key, and so of all that follow it: texts of different salts share none.

    Pages are looked up by this key as a whole. A dict hashes it and then compares it, and a number stands for one chain
    of tokens for ever; so equal hashes cannot give a request another text's keys.
    """

    parent: int
    tokens: bytes
    salt: str = ""


class BlockPool:
    """Reference counts of `total` pages, and the known ones among them."""

    def __init__(self, total: int):
        self.total = total
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: dict[Prefix, tuple[int, int]] = {}  # to the page, and the number of the prefix that it ends
        self._prefix: dict[int, Prefix] = {}  # by page
        self._numbers = count(ROOT + 1)

    @property
    def free(self) -> int:
        """Pages that `take` can give: free or idle."""
        return len(self._free) + len(self._idle)

    @property
    def known(self) -> int:
        """Pages that are known by their tokens, held or idle."""
        return len(self._prefix)

    def grow(self, total: int) -> None:
        """Adds free pages up to `total`; the others keep their numbers."""
        self._free = [*range(total - 1, self.total - 1, -1), *self._free]
        self._holders += [0] * (total - self.total)
        self.total = total

    def holders(self, page: int) -> int:
        """Requests that hold the page."""
        return self._holders[page]

    def take(self) -> int:
        """A page for one holder; what it holds is nobody's. Raises OutOfPages."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = next(iter(self._idle))
            del self._idle[page]
            self.forget(page)
        else:
            raise OutOfPages(1, KEY_BLOCK)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held or known."""
        if not self._holders[page]:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is held by no request")
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefix:
            self._idle[page] = None
        else:
            self._free.append(page)

    def is_known(self, page: int) -> bool:
        """Whether the page is known by its tokens."""
        return page in self._prefix

    def find(self, prefix: Prefix) -> tuple[int, int] | None:
        """The page known by `prefix` and the number of the prefix that it ends, or None."""
        return self._known.get(prefix)

    def know(self, page: int, prefix: Prefix) -> int:
        """Makes a held page known, unless another page is known by the same; returns the number of what it ends.

        Raises ValueError where the page is known to hold other tokens.
        """
        before = self._prefix.get(page)
        if before is not None and before.tokens != prefix.tokens:
            raise ValueError(f"page {page} is known to hold other tokens")
        if (found := self._known.get(prefix)) is not None:
            if found[0] != page:
                self.forget(page)
            return found[1]
        # What the page was known by can no longer be reached: the page of its parent was taken meanwhile.
        self.forget(page)
        number = next(self._numbers)
        self._known[prefix], self._prefix[page] = (page, number), prefix
        return number

    def forget(self, page: int) -> None:
        """Nobody takes over the page from now on: it is about to be written."""
        prefix = self._prefix.pop(page, None)
        if prefix is not None:
            del self._known[prefix]
