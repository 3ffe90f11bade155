"""A draft with another tokenizer: it continues the text, and the target's tokenizer makes tokens of what it wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from runtime.contract import Loaded
from runtime.sampling.detokenize import decode, encode_plain, same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, EachText, Request
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.verify import Rule

# Tokens of a text that new ones are encoded and decoded after: some tokenizers write a word otherwise at a beginning.
_CONTEXT = 8
# A character has at most four bytes, so at most three tokens of an unfinished one can end a text.
_UNFINISHED = 3


@dataclass
class _Text:
    """A request in the draft's tokens: `shadow` is what the draft continues, `room` the most tokens of its cache."""

    shadow: Request
    room: int


class ReencodedDrafter(EachText[_Text]):
    """Drafts text with a model whose tokenizer is not the target's.

    A round decodes the request's text, encodes it for the draft (whose cache keeps the part that stays the same), lets
    the draft continue it greedily, and encodes what it wrote for the target: a deterministic chain. So every rule stays
    as lossless as it is; the tokens may only be fewer, or other ones than the target would make of the same text, at
    the draft's end for instance, where a word is cut.
    """

    name = "model (re-encoded)"

    def __init__(self, model: Loaded, target_tokenizer: Any) -> None:
        """Raises UserError where the model has no tokenizer."""
        super().__init__()
        self._theirs, self._ours = model.tokenizer, target_tokenizer
        self._positions = model.decoder.max_positions
        self._model = ModelDrafter(model)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One chain per request, of as much as the draft writes in budgets[i] of its own tokens."""
        drafts = [Draft() for _ in requests]
        asked: dict[int, tuple[list[int], Request]] = {}
        for i, (request, budget) in enumerate(zip(requests, budgets, strict=True)):
            settled = self._settled(request.tokens)
            if budget > 0 and settled:
                shadow = self._shadow(request, decode(self._ours, settled), budget)
                if shadow is not None:
                    asked[i] = settled, shadow
        found = self._model.propose([shadow for _, shadow in asked.values()], [budgets[i] for i in asked])
        for (i, (settled, shadow)), draft in zip(asked.items(), found, strict=True):
            tokens = self._encoded(settled, self._written(shadow.tokens, draft.tokens))
            # What the text holds of an unfinished character has to begin the draft, too.
            held = requests[i].tokens[len(settled) :]
            if tokens[: len(held)] == held:
                tokens = tokens[len(held) :][: budgets[i]]
                drafts[i] = Draft.chain(tokens)
        return drafts

    def close(self, request: Request) -> None:
        text = self._texts.pop(request.id, None)
        if text is not None:
            self._model.close(text.shadow)

    def _settled(self, tokens: list[int]) -> list[int]:
        """The tokens without those of an unfinished character at the end."""
        for cut in range(_UNFINISHED + 1):
            if not decode(self._ours, tokens[: len(tokens) - cut][-_CONTEXT:]).endswith("�"):
                return tokens[: len(tokens) - cut]
        # It is the text that holds a �, or bytes that are no character.
        return tokens

    def _shadow(self, request: Request, text: str, budget: int) -> Request | None:
        """The text in the draft's tokens, as a request of its own; None where the draft's positions end."""
        tokens: list[int] = list(self._theirs(text)["input_ids"])
        needed = len(tokens) + budget
        if not tokens or needed > self._positions:
            return None
        known = self._texts.get(request.id)
        if known is None or needed > known.room:
            if known is not None:
                self._model.close(known.shadow)
            # Nobody knows how many of its tokens the whole text will be: twice as many as now, and again if need be.
            known = self._texts[request.id] = _Text(Request(request.id, [], 0, Sampling(), 0), 2 * needed)
            known.shadow.max_new_tokens = known.room
        shadow = known.shadow
        pairs = zip(shadow.tokens, tokens, strict=False)
        self._model.revise(shadow, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        shadow.tokens = tokens
        return shadow

    def _written(self, before: list[int], new: list[int]) -> str:
        """The text that the draft's new tokens add before it ends the text, without an unfinished character."""
        ends = set(self._theirs.all_special_ids)
        new = list(takewhile(lambda token: token not in ends, new))
        context = before[-_CONTEXT:]
        old, both = decode(self._theirs, context), decode(self._theirs, context + new)
        return both[len(old) :].rstrip("�") if both.startswith(old) else ""

    def _encoded(self, before: list[int], text: str) -> list[int]:
        """The target's tokens that write this text after those before it; [] where none are found that do."""
        if not text:
            return []
        context = before[-_CONTEXT:]
        wanted = decode(self._ours, context) + text
        whole = encode_plain(self._ours, wanted)
        # Where a token reaches over the border, as when a word was cut, the text is encoded by itself.
        alone = encode_plain(self._ours, text)
        for tokens in ([whole[len(context) :]] if whole[: len(context)] == context else []) + [alone]:
            if decode(self._ours, context + tokens) == wanted:
                return tokens
        return []


def model_drafter(target: Loaded, draft: Loaded, verify: Rule = "coupled") -> ModelDrafter | ReencodedDrafter:
    """A draft model for a target: token by token where they share a vocabulary, otherwise through the text."""
    if same_vocabulary(target.tokenizer, draft.tokenizer):
        return ModelDrafter(draft, verify, target.decoder.vocab_size)
    return ReencodedDrafter(draft, target.tokenizer)
