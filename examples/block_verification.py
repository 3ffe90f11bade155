"""How many drafted tokens judging whole blocks accepts more than judging token by token, both without any loss.

    python examples/block_verification.py
    python examples/block_verification.py --target org/name --draft org/smaller --temperature 0.8

`rejection` verifies blocks (2403.10444). Both rules judge the same drafts here, drawn from the draft model after texts
that the target goes on with: of each draft the expected number of accepted tokens is summed, so that chance is in the
drafts alone. By tokens that is the sum of the products of min(1, p / q) along the draft; by blocks, of the masses.
"""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.contract import Decoder

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def expected(ratios: "NDArray[np.float64]") -> tuple[float, float]:
    """Of p / q along a draft (n,): accepted tokens by tokens, and by blocks."""
    block, blocks = 1.0, 0.0
    for ratio in ratios:
        block = min(1.0, block * float(ratio))
        blocks += block
    return float(np.minimum(ratios, 1.0).cumprod().sum()), blocks


class Text:
    """A text in a decoder's cache, whose last token is not in there yet."""

    def __init__(self, decoder: "Decoder", tokens: list[int], room: int):
        self.decoder, self.cache = decoder, decoder.new_cache()
        self.request = self.cache.open(len(tokens) + room)
        self.held = 0
        if len(tokens) > 1:
            self.rows(tokens[:-1])

    def rows(self, tokens: list[int]) -> "NDArray[np.float64]":
        """Logits (n, V) after each of some further tokens."""
        import torch

        from runtime.contract import Rows

        rows = Rows.chains([(self.request, self.held, len(tokens))])
        self.held += len(tokens)
        out: NDArray[np.float64] = self.decoder.forward(torch.tensor(tokens), rows, self.cache).logits.double().numpy()
        return out

    def cut(self, length: int) -> None:
        """Forgets what follows the first `length` tokens."""
        self.cache.truncate(self.request, min(length, self.held))
        self.held = min(length, self.held)


def _softmax(logits: "NDArray[np.float64]", temperature: float) -> "NDArray[np.float64]":
    scaled = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    found: NDArray[np.float64] = scaled / scaled.sum(-1, keepdims=True)
    return found


@app.command()
def main(
    target: Annotated[str, typer.Option(help="Directory or hub name.", show_default="the embedded pair's")] = "",
    draft: Annotated[str, typer.Option(help="A model with the same tokens.", show_default="the pair's")] = "",
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Drafts after each prompt.")] = 24,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.05, help="Of both models.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and drafts.")] = 0,
) -> None:
    """Prints both rules' accepted tokens a draft, and their ratio with its 95 % interval over prompts."""
    with without_traceback():
        from calib import corpora
        from calib.prompts import prompts
        from compress.model.source import default_pair
        from runtime import load

        paths = [given or str(default) for given, default in zip((target, draft), default_pair(), strict=True)]
        large, small = (load(path) for path in paths)
        texts = prompts(corpora.load("stdlib"), count, seed)
        known = min(large.decoder.vocab_size, small.decoder.vocab_size)
        sums = np.zeros((len(texts), 2))
        for number, prompt in enumerate(texts):
            tokens = list(large.tokenizer(prompt)["input_ids"])
            sums[number] = _judge(
                large.decoder, small.decoder, tokens, rounds, draft_length, temperature, seed + number, known
            )
        totals, draws = sums.sum(0), np.random.default_rng(seed).integers(0, len(texts), (2000, len(texts)))
        ratios = sums[draws].sum(1)
        low, high = np.quantile(ratios[:, 1] / ratios[:, 0], (0.025, 0.975))
        drafts = len(texts) * rounds
        print(f"{drafts} drafts of {draft_length} tokens, temperature {temperature:g}: accepted on average")
        print(f"token by token {totals[0] / drafts:.3f}, blocks {totals[1] / drafts:.3f}:", end=" ")
        print(f"{100 * (totals[1] / totals[0] - 1):+.1f} % (95 %: {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})")


def _judge(
    large: "Decoder",
    small: "Decoder",
    tokens: list[int],
    rounds: int,
    length: int,
    temperature: float,
    seed: int,
    known: int,
) -> tuple[float, float]:
    """Sums of both rules over the drafts after one prompt; the text goes on with the target's own tokens."""
    draws, room = np.random.default_rng(seed), rounds + length + 1
    target, drafter = Text(large, tokens, room), Text(small, tokens, room)
    by_token = by_block = 0.0
    for _ in range(rounds):
        drafted: list[int] = []
        proposals = []
        for _ in range(length):
            q = _softmax(drafter.rows(tokens[drafter.held :] + drafted[-1:])[-1][:known], temperature)
            drafted.append(int(draws.choice(known, p=q)))
            proposals.append(q[drafted[-1]])
        p = _softmax(target.rows([tokens[-1], *drafted])[:, :known], temperature)
        found = expected(p[range(length), drafted] / np.array(proposals))
        by_token, by_block = by_token + found[0], by_block + found[1]
        target.cut(len(tokens))
        drafter.cut(len(tokens))
        tokens = [*tokens, int(draws.choice(known, p=p[0]))]
    return by_token, by_block


if __name__ == "__main__":
    app()
