"""Suffix matching: the most frequent continuation of the longest stretch that the text ends with and that came before.

The idea of drafting from suffix automata, of the text itself and of a corpus, is SAM decoding's (2411.10666).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.drafters import Draft, Outcome, Request
from runtime.drafters.automaton import ROOT, SuffixAutomaton


@dataclass
class _Text:
    """One request's own automaton, how much of its text is in it, and where that text stands in the corpus."""

    own: SuffixAutomaton
    read: int = 0
    state: int = ROOT
    length: int = 0


class SuffixDrafter:
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
        self.min_match, self.max_match = min_match, max_match
        self._texts: dict[int, _Text] = {}
        self._corpus = SuffixAutomaton(max_match)
        for tokens in corpus:
            for token in tokens:
                self._corpus.append(token)
            self._corpus.separate()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One chain per request, an empty one where no suffix of min_match tokens has come before.

        A chain ends before its budget where nothing of min_match tokens at its end has a continuation.
        """
        return [self._draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the next `propose` reads the texts themselves."""

    def close(self, request: Request) -> None:
        """Forgets the text's automaton."""
        self._texts.pop(request.id, None)

    def _draft(self, request: Request, budget: int) -> Draft:
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
        return Draft(tokens, list(range(-1, len(tokens) - 1)))
