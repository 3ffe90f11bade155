"""Prompts, drafters and texts without speculation, for tests of the loop."""

from collections.abc import Callable, Sequence
from typing import Any

from runtime.speculate import Speculator
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.drafters.lookup import LookupDrafter

Fake = Callable[..., Any]

PROMPTS = [[5, 6, 7], [9] * 40, [1, 2, 3, 1, 2, 3, 1, 2], [300, 4]]


class TreeDrafter:
    """A tree that holds the target's greedy path now and then: two branches, the right one under random siblings."""

    name = "tree"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: list[Outcome] = []
        self.closed: list[int] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            if budget < 5:
                drafts.append(Draft())
                continue
            path = list(request.tokens)
            for _ in range(2):
                path.append(int(self.model.decoder.law(tuple(path[-3:])).argmax()))
            first, second = path[-2:]
            wrong = len(request.tokens) % 3
            # Chain order is avoided on purpose: the right path is 1, 4.
            drafts.append(Draft([(first + 1) % 320, first, 7, 8, (second + wrong) % 320], [-1, -1, 0, 1, 1]))
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.seen += outcomes

    def close(self, request: Request) -> None:
        self.closed.append(request.id)


def plain(target: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """One request at a time, without a draft."""
    return [Speculator(target).generate([prompt], **options)[0].tokens for prompt in prompts]


def drafter_for(kind: str, fake: Fake, target: Any) -> Any:
    return {
        "good": lambda: fake(0, noise=1.0),
        "bad": lambda: fake(99),
        "lookup": LookupDrafter,
        "tree": lambda: TreeDrafter(target),
    }[kind]()
