"""What caches have in common whose requests share nothing: there are no pages, and no prefix is known."""

from collections.abc import Mapping, Sequence


class SharesNothing:
    """What a `contract.Cache` says whose requests share no memory."""

    @property
    def pages(self) -> int:
        """0: there are no pages."""
        return 0

    @property
    def pages_free(self) -> int:
        """0: there are no pages."""
        return 0

    def match_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> int:
        """0: nothing is known here."""
        return 0

    def cache_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> None:
        """Does nothing."""

    def piece_end(self, request: int, end: int, length: int) -> int:
        """Anywhere: nobody else begins there."""
        return end

    def missing_pages(self, needs: Mapping[int, int]) -> int:
        """0: there are no pages."""
        return 0
