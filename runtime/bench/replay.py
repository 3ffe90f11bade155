"""A drafter for benchmarks: acceptance as somebody measured it, at what a block drafter of random weights costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from runtime.checkpoints.block_draft import Description
from runtime.errors import UserError
from runtime.model.base import BaseDecoder
from runtime.model.load import Model
from runtime.sampling.noise import Stream, uniforms
from runtime.speculative.draft import Draft, Outcome, Request, TakenStates
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import BlockNetwork, made, tables

# DSpark's and DFlash's length (2607.05147, table 1).
LENGTH = 7


@dataclass
class ReplayedDrafter:
    """Chains whose token k is the target's with probability rates[k], where all before it are; beyond, the last rate.

    The block drafter that is wrapped reads the target's states and drafts all the same, so that rounds take what they
    would with trained weights. Shows what speculation gains at known rates, not that any drafter has them.

    known   by prompt (token ids): the text that plain decoding continues it with.
    length  tokens of a draft at most, whatever γ.

    Raises UserError for rates outside 0..1.
    """

    block: BlockDrafter
    known: Mapping[tuple[int, ...], Sequence[int]]
    rates: tuple[float, ...]
    vocab_size: int
    length: int = LENGTH
    seed: int = 0
    name: str = field(default="oracle+block", init=False)

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise UserError(f"--rates must be numbers from 0 to 1, found {list(self.rates)}; choose others")

    @property
    def taps(self) -> tuple[int, ...]:
        """See StateReader."""
        return self.block.taps

    def read(self, taken: Sequence[TakenStates]) -> None:
        """See StateReader."""
        self.block.read(taken)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """See Drafter."""
        budgets = [min(budget, self.length) for budget in budgets]
        drafts = self.block.propose(requests, budgets)
        return [
            self._replayed(request, budget) if budget else draft
            for request, budget, draft in zip(requests, budgets, drafts, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See Drafter."""
        self.block.observe(outcomes)

    def close(self, request: Request) -> None:
        """See Drafter."""
        self.block.close(request)

    def _replayed(self, request: Request, length: int) -> Draft:
        text = self.known.get(tuple(request.tokens[: request.prompt_length]), ())
        first = len(request.new_tokens)
        ahead = list(text[first : first + length])
        # Each place of a text has its luck, in whatever draft it comes: drafts of any length, which begin at other
        # places, are compared by the same. Within one way of decoding no place is drafted again once it was refused.
        draws = uniforms(request.id << 32 | self.seed, request.prompt_length, Stream.DRAFT, 1 + first + len(ahead))
        for place, token in enumerate(ahead):
            if draws[first + place] >= self.rates[min(place, len(self.rates) - 1)]:
                ahead[place] = (token + 1) % self.vocab_size
        return Draft.chain(ahead)


def random_network(
    model: Model, layers: int = 1, scheme: str = "int4", seed: int = 0, frequent: int = 0
) -> BlockNetwork:
    """A block drafter's network for a model, of random weights in the sizes that the stage block_draft would choose.

    frequent  tokens of its head; 0: the whole vocabulary.

    Raises UserError for a model that Specpress' own kernels do not run.
    """
    decoder = model.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError(f"oracle+block needs Specpress' own kernels, and {decoder.kernels} run this target")
    a, depth = decoder.architecture, decoder.layers
    about = Description(
        taps=tuple(sorted({depth // 2, depth - 1, depth})),
        length=LENGTH,
        layers=layers,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=a.intermediate,
        window=128,
        rank=256,
        hidden_size=a.hidden,
        vocab_size=a.vocab,
        scheme=scheme,
        head=scheme,
        target="",
        norm_eps=a.norm_eps,
        frequent=frequent,
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if "norm" in name
        else torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.5
        for name, shape in about.shapes().items()
        if name != "frequent"
    }
    if frequent:
        weights["frequent"] = torch.randperm(a.vocab, generator=generator)[:frequent].sort().values
    return made(about, weights, *tables(model.path, decoder), decoder)


def parse_rates(text: str) -> tuple[float, ...]:
    """The rates of "0.9,0.8". Raises UserError for what are no numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--rates: expected numbers with commas between them, found {text!r}; correct it") from error
