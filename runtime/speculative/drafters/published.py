"""Drafters of published heads: EAGLE-3 and multi-token prediction token by token, P-EAGLE, DFlash and DSpark at once.

All of them read the target's hidden states of a text's tokens as the target reads these. Whatever the text becomes,
those states stay, so that a head's keys and values are never taken back: only a draft's own are forgotten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.checkpoints.heads.record import HeadKind
from runtime.sampling.distribution import argmax_tokens, host
from runtime.speculative.draft import Draft, EachText, Request, TakenStates
from runtime.speculative.drafters.block import WORTH
from runtime.speculative.drafters.model import Drafting, add_token, argmax_alone, stacked
from runtime.speculative.heads.blocks import Span, TextMemory
from runtime.speculative.heads.markov import acceptance, bias
from runtime.speculative.heads.network import (
    Head,
    fuse,
    logits_and_next,
    new_memory,
    remember_context,
    run_rows,
    run_together,
)
from runtime.speculative.verify import Rule

# Rows of a text that a head reads in one pass, and hidden states that wait to be fused, which bounds its memory.
_PIECE = 512


@dataclass
class _Text:
    """What is known of a text: keys and values, and hidden states that are not in them yet, in the order of the text.

    known   the position behind the last one whose hidden state came.
    fused   the first position of a piece, and its states (n, hidden) as the head reads them.
    unread  the same behind these, as the target gave them (n, taps · its hidden); `waiting` in all.
    """

    memory: TextMemory
    known: int
    fused: list[tuple[int, Tensor]] = field(default_factory=list)
    unread: list[tuple[int, Tensor]] = field(default_factory=list)
    waiting: int = 0

    def fuse(self, head: Head) -> None:
        """Fuses all of them in one product, whose weights are as many as a layer's."""
        if self.unread:
            sizes = [len(states) for _, states in self.unread]
            done = fuse(head, torch.cat([states for _, states in self.unread])).split(sizes)
            self.fused += [(start, own) for (start, _), own in zip(self.unread, done, strict=True)]
            self.unread.clear()
            self.waiting = 0

    def take(self, head: Head) -> list[tuple[int, Tensor]]:
        """All states that are not in the memory, which are read then: the longest pieces without a gap."""
        self.fuse(head)
        whole: list[tuple[int, list[Tensor]]] = []
        behind = -1
        for start, states in self.fused:
            if start != behind:
                whole.append((start, []))
            whole[-1][1].append(states)
            behind = start + len(states)
        self.fused.clear()
        return [(start, torch.cat(parts)) for start, parts in whole]


@dataclass(frozen=True)
class _Asked:
    """One request of a round: its draft as it grows, and what the head has not read of its text.

    fused  (n, hidden), n > 0, of the positions from memory.end on; the text's last token is behind them.
    """

    drafting: Drafting
    memory: TextMemory
    fused: Tensor

    @property
    def tokens(self) -> list[int]:
        """The token behind each of those that are not read yet."""
        return self.drafting.request.tokens[self.memory.end + 1 :]

    @property
    def last(self) -> int:
        """The text's last token."""
        return self.drafting.request.tokens[-1]


class PublishedDrafter(EachText[_Text]):
    """Drafts chains with a head that somebody trained for this target.

    head    what `load_head` returned.
    taps    the places of the target whose hidden states it reads (StateReader).
    verify  the rule that will verify; sampling is ModelDrafter's. Tokens beyond the draft vocabulary have no chance.

    A request whose last hidden states are not known gets no draft; of those before them some may be missing, of a
    prefix that the cache knew or of rounds without drafts. States are fused when a draft needs them.
    """

    def __init__(self, head: Head, taps: Sequence[int], verify: Rule = "coupled") -> None:
        super().__init__()
        self.name: str = head.about.kind
        self.taps = tuple(taps)
        self._head, self._rule = head, verify

    def read(self, taken: Sequence[TakenStates]) -> None:
        """See StateReader."""
        for part in taken:
            text = self._texts.get(part.request.id)
            if text is None or text.known > part.start:
                self.close(part.request)
                capacity = part.request.prompt_length + part.request.max_new_tokens
                memory = new_memory(self._head, part.start, capacity)
                text = self._texts[part.request.id] = _Text(memory, part.start)
            text.unread.append((part.start, part.states))
            count = part.states.shape[0]
            text.known, text.waiting = part.start + count, text.waiting + count
            if text.waiting >= _PIECE:
                text.fuse(self._head)

    def close(self, request: Request) -> None:
        """Forgets the text."""
        text = self._texts.pop(request.id, None)
        if text is not None:
            text.memory.close()

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """A chain for each request whose last token's predecessor was read since the last draft."""
        drafting = [Drafting(r, self._affordable(budget)) for r, budget in zip(requests, budgets, strict=True)]
        asked = []
        for one in drafting:
            text = self._texts.get(one.request.id)
            ready = text is not None and (text.unread or text.fused) and text.known == len(one.request.tokens) - 1
            if one.budget > 0 and ready and text is not None:
                *before, (start, fused) = text.take(self._head)
                for first, piece in before:
                    text.memory.skip(first - text.memory.end)
                    read_all(self._head, text.memory, one.request.tokens, piece)
                text.memory.skip(start - text.memory.end)
                asked.append(_Asked(one, text.memory, fused))
        if asked:
            METHODS[self._head.about.kind].draft(self._head, asked, self._choose)
            for part in asked:
                part.memory.forget()
        vocab = self._head.about.vocab
        return [Draft.chain(one.tokens, stacked(one.probs, vocab)) for one in drafting]

    def _affordable(self, budget: int) -> int:
        most = self._head.about.tokens
        return min(budget, most) if most else budget

    def _choose(self, logits: Tensor, drafting: Sequence[Drafting]) -> None:
        """One token more for each draft, after logits (B, draft vocabulary)."""
        known = host(logits)
        best = argmax_tokens(known, "draft")
        ids = self._head.tokens
        for i, one in enumerate(drafting):
            if ids is None:
                add_token(self._rule, one, known[i : i + 1], best[i])
                continue
            if argmax_alone(one.request.sampling):
                one.tokens.append(int(ids[best[i]]))
                continue
            row = logits.new_full((1, self._head.about.vocab), -torch.inf)
            row[0, ids] = logits[i]
            add_token(self._rule, one, host(row), int(ids[best[i]]))


Choose = Callable[[Tensor, Sequence[Drafting]], None]


def draft_serially(head: Head, asked: Sequence[_Asked], choose: Choose) -> None:
    """A pass for what was not read, and one for each drafted token but the last (eagle3, mtp)."""
    rests = [_read_pieces(head, one) for one in asked]
    spans = _spans(asked, rests)
    hidden = torch.cat([one.fused[rest:] for one, rest in zip(asked, rests, strict=True)])
    tokens = [token for one, rest in zip(asked, rests, strict=True) for token in one.tokens]
    x = run_rows(head, tokens, hidden, spans)[[span.first + span.count - 1 for span in spans]]
    for span in spans:
        span.memory.keep(span.count)
    growing = list(asked)
    while True:
        logits, hidden = logits_and_next(head, x)
        choose(logits, [one.drafting for one in growing])
        left = [i for i, one in enumerate(growing) if len(one.drafting.tokens) < one.drafting.budget]
        growing = [growing[i] for i in left]
        if not growing:
            return
        spans = [Span(one.memory, i, 1) for i, one in enumerate(growing)]
        x = run_rows(head, [one.drafting.tokens[-1] for one in growing], hidden[left], spans)


def draft_with_masks(head: Head, asked: Sequence[_Asked], choose: Choose) -> None:
    """One pass for what was not read and for all drafted tokens, masks standing for those before each (peagle)."""
    assert head.unknown is not None
    masked = fuse(head, head.unknown)
    rests = [_read_pieces(head, one) for one in asked]
    spans = _spans(asked, rests, [one.drafting.budget - 1 for one in asked])
    tokens: list[int] = []
    hidden: list[Tensor] = []
    ends = []
    for one, rest in zip(asked, rests, strict=True):
        masks = one.drafting.budget - 1
        tokens += one.tokens + [head.about.mask_token] * masks
        hidden += [one.fused[rest:], masked.expand(masks, -1)]
        ends.append(len(tokens) - masks - 1)
    x = run_rows(head, tokens, torch.cat(hidden), spans)
    for one, rest in zip(asked, rests, strict=True):
        one.memory.keep(len(one.fused) - rest)
    rows = [end + i for end, one in zip(ends, asked, strict=True) for i in range(one.drafting.budget)]
    logits, _ = logits_and_next(head, x[rows])
    _choose_along(head, asked, logits, x, choose)


def draft_block(head: Head, asked: Sequence[_Asked], choose: Choose) -> None:
    """One pass for a whole block, behind the keys and values of what the target read (dflash, dspark)."""
    about = head.about
    for one in asked:
        read_all(head, one.memory, one.drafting.request.tokens, one.fused)
    skipped = 0 if about.from_anchor else 1
    size = about.tokens + skipped
    tokens = [token for one in asked for token in (one.last, *([about.mask_token] * (size - 1)))]
    spans = [Span(one.memory, i * size, size) for i, one in enumerate(asked)]
    x = run_together(head, tokens, spans)
    rows = [i * size + skipped + j for i, one in enumerate(asked) for j in range(one.drafting.budget)]
    hidden = x[rows]
    _choose_along(head, asked, head.lm_head(hidden), hidden, choose)


def _choose_along(head: Head, asked: Sequence[_Asked], logits: Tensor, hidden: Tensor, choose: Choose) -> None:
    """Drafts all tokens from their logits (all budgets, draft vocabulary), which dspark bends by the token before.

    A draft ends where dspark's confidence says that the text comes to the next token with less than WORTH. That depends
    on the tokens before it alone, so that `rejection` stays exact.
    """
    begins = [0, *accumulate(one.drafting.budget for one in asked)]
    before = [one.last for one in asked]
    state = hidden.new_zeros((len(asked), head.about.rank))
    reached = hidden.new_ones(len(asked))
    for step in range(max(one.drafting.budget for one in asked)):
        still = [i for i, one in enumerate(asked) if one.drafting.budget > step and reached[i] >= WORTH]
        rows, tokens = [begins[i] + step for i in still], [before[i] for i in still]
        if head.confidence is not None:
            reached[still] *= acceptance(head.confidence, hidden[rows], tokens, head.markov)
            kept = [n for n, i in enumerate(still) if reached[i] >= WORTH]
            still, rows, tokens = ([part[n] for n in kept] for part in (still, rows, tokens))
        if not still:
            return
        found = logits[rows]
        if head.markov is not None:
            bent, state[still] = bias(head.markov, tokens, hidden[rows], state[still])
            found = found + bent
        choose(found, [asked[i].drafting for i in still])
        for i in still:
            before[i] = asked[i].drafting.tokens[-1]


def _read_pieces(head: Head, one: _Asked) -> int:
    """Reads all but the last piece of what a head's rows have not read yet; how many that were."""
    done = (len(one.fused) - 1) // _PIECE * _PIECE
    read_all(head, one.memory, one.drafting.request.tokens, one.fused[:done])
    return done


def read_all(head: Head, memory: TextMemory, tokens: Sequence[int], fused: Tensor) -> None:
    """Reads fused hidden states (n, hidden) of a text, of the positions from memory.end on."""
    for piece in fused.split(_PIECE) if len(fused) else ():
        span = [Span(memory, 0, len(piece))]
        if METHODS[head.about.kind].beside:
            remember_context(head, piece, span)
        else:
            run_rows(head, tokens[memory.end + 1 : memory.end + 1 + len(piece)], piece, span)
        memory.keep(len(piece))


def _spans(asked: Sequence[_Asked], rests: Sequence[int], more: Sequence[int] | None = None) -> list[Span]:
    """Of each text the rows that it has left to read, and `more` behind them."""
    counts = [len(one.fused) - rest for one, rest in zip(asked, rests, strict=True)]
    counts = [count + extra for count, extra in zip(counts, more or [0] * len(counts), strict=True)]
    begins = [0, *accumulate(counts)]
    return [Span(one.memory, begin, count) for one, begin, count in zip(asked, begins, counts, strict=False)]


class Method(NamedTuple):
    """How heads of a kind draft. beside: keys and values are of the target's states alone, without a row of a token."""

    draft: Callable[[Head, Sequence[_Asked], Choose], None]
    beside: bool = False


METHODS: dict[HeadKind, Method] = {
    "eagle3": Method(draft_serially),
    "mtp": Method(draft_serially),
    "peagle": Method(draft_with_masks),
    "dflash": Method(draft_block, beside=True),
    "dspark": Method(draft_block, beside=True),
}
