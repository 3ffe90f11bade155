"""Drafting by the longest suffix that has occurred before, in the text itself or in a corpus, by suffix automata."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.speculative.draft import CopyingDrafter, Draft, Request

# The state of the empty stretch, and the suffix link of that state.
ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """The smallest automaton of all stretches of a text (Blumer et al. 1985), with counts of what followed them.

    A state stands for the stretches that end at the same places of the text; its suffix link leads to the longest
    suffix that ends at more places. Appending a token takes amortised constant time, and counting at most `max_match`
    steps more: what followed stretches longer than that is not counted. A token takes about half a kilobyte.
    """

    def __init__(self, max_match: int) -> None:
        """Raises ValueError where max_match is below 1."""
        if max_match < 1:
            raise ValueError(f"max_match must be at least 1, but is {max_match}")
        self.max_match = max_match
        self.length = [0]  # of each state's longest stretch
        self.link = [_NONE]
        self.next: list[dict[int, int]] = [{}]
        # The most frequent continuation of each state (the latest of equals), and all counts where there are several.
        self._best = [_NONE]
        self._count = [0]
        self._others: list[dict[int, int] | None] = [None]
        self._last = ROOT  # of the whole text
        # Of the text's last max_match tokens, fewer near its beginning: the state, and how many.
        self._suffix, self._held = ROOT, 0

    def append(self, token: int) -> None:
        """Adds a token (at least 0) to the text's end."""
        state = self._suffix
        while state > ROOT:
            self._tally(state, token)
            state = self.link[state]
        self._extend(token)
        self._held = min(self._held + 1, self.max_match)
        self._suffix = self.shorten(self.next[self._suffix][token], self._held)

    def separate(self) -> None:
        """Ends one text and begins another: no stretch that was counted reaches from one into the other."""
        self._extend(_NONE)
        self._suffix, self._held = ROOT, 0

    def longest(self) -> tuple[int, int]:
        """State and length of the text's longest suffix of at most max_match tokens that something followed before."""
        return self.continued(self._suffix, self._held)

    def best(self, state: int) -> int:
        """The token that followed the state's stretches most often, the latest of equals; −1 where nothing did."""
        return self._best[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix, of at most max_match tokens, of a stretch of a state and one more token that occurs here.

        `length` is the stretch's. Returns the suffix's state and length, the root's where not even the token occurs.
        """
        while token not in self.next[state]:
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            length = self.length[state]
        length = min(length + 1, self.max_match)
        return self.shorten(self.next[state][token], length), length

    def shorten(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a state's stretch (which may be shorter: then the state itself)."""
        while state != ROOT and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def continued(self, state: int, length: int) -> tuple[int, int]:
        """State and length of the longest suffix of a stretch that something followed; the root's where nothing did."""
        while state != ROOT and self._best[state] == _NONE:
            state = self.link[state]
        return state, min(length, self.length[state])

    def _tally(self, state: int, token: int) -> None:
        counts = self._others[state]
        if counts is None:
            if self._best[state] in (_NONE, token):
                self._best[state] = token
                self._count[state] += 1
                return
            counts = self._others[state] = {self._best[state]: self._count[state]}
        counts[token] = counts.get(token, 0) + 1
        if counts[token] >= self._count[state]:
            self._best[state], self._count[state] = token, counts[token]

    def _extend(self, token: int) -> None:
        """Blumer's step: a state for the whole text, and a second one where some suffix now ends at more places."""
        new = self._add(self.length[self._last] + 1, {})
        state = self._last
        self._last = new
        while state != _NONE and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state == _NONE:
            self.link[new] = ROOT
            return
        found = self.next[state][token]
        if self.length[found] == self.length[state] + 1:
            self.link[new] = found
            return
        copy = self._add(self.length[state] + 1, dict(self.next[found]))
        self.link[copy] = self.link[found]
        self._best[copy], self._count[copy] = self._best[found], self._count[found]
        others = self._others[found]
        self._others[copy] = None if others is None else dict(others)
        self.link[found] = self.link[new] = copy
        while state != _NONE and self.next[state].get(token) == found:
            self.next[state][token] = copy
            state = self.link[state]
        # The text's end may lie in the state that was split: its short stretches have moved.
        if self._suffix == found:
            self._suffix = self.shorten(found, self._held)

    def _add(self, length: int, transitions: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(ROOT)
        self.next.append(transitions)
        self._best.append(_NONE)
        self._count.append(0)
        self._others.append(None)
        return len(self.length) - 1


@dataclass
class _Text:
    """One request's own automaton, how much of its text is in it, and where that text stands in the corpus."""

    own: SuffixAutomaton
    read: int = 0
    state: int = ROOT
    length: int = 0


class SuffixDrafter(CopyingDrafter[_Text]):
    """Continues the text's longest suffix that has come before, in the text itself or in a corpus.

    corpus     token lists that texts may resemble; they are read once, here, and take about half a kilobyte a token.
    min_match  a suffix shorter than this is not continued.
    max_match  of a longer suffix only so many tokens are compared.

    Where both hold an equally long suffix the text's own wins. The token proposed is the one that followed the suffix
    most often, the latest of equals; with it the suffix grows, and the next token is found in the same way. The
    proposal is deterministic. A round costs amortised constant time a new token, whatever the text's length.
    """

    name = "suffix"

    def __init__(self, corpus: Sequence[Sequence[int]] = (), min_match: int = 2, max_match: int = 32) -> None:
        """Raises ValueError unless 1 ≤ min_match ≤ max_match."""
        if not 1 <= min_match <= max_match:
            raise ValueError(f"1 ≤ min_match ≤ max_match is expected, but they are {min_match} and {max_match}")
        super().__init__()
        self.min_match, self.max_match = min_match, max_match
        self._corpus = SuffixAutomaton(max_match)
        for tokens in corpus:
            for token in tokens:
                self._corpus.append(token)
            self._corpus.separate()

    def draft_one(self, request: Request, budget: int) -> Draft:
        """An empty chain where no suffix of min_match tokens has come before; it ends where nothing goes on."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(SuffixAutomaton(self.max_match))
        for token in request.tokens[text.read :]:
            text.own.append(token)
            text.state, text.length = self._corpus.step(text.state, text.length, token)
        text.read = len(request.tokens)
        source = text.own
        state, length = source.longest()
        there, reach = self._corpus.continued(text.state, text.length)
        if reach > length:
            source, state, length = self._corpus, there, reach
        tokens: list[int] = []
        while len(tokens) < budget and length >= self.min_match:
            tokens.append(source.best(state))
            state, length = source.continued(*source.step(state, length, tokens[-1]))
        return Draft.chain(tokens)
