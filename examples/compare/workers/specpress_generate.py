"""Specpress: `Speculator` over an artifact's `model/`, with a drafter by name."""

from collections.abc import Callable
from importlib.metadata import version

from runtime import Model, Speculator, load
from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from workers.generation import Options, serve


class Specpress:
    """One Speculator per draft length, over one target and one draft."""

    def __init__(self, options: Options):
        self.target = load(options.target, threads=options.threads)
        self.options = options
        self.draft = load(options.draft, threads=options.threads) if options.drafter == "model" else None
        self.speculators: dict[int | None, Speculator] = {}

    def describe(self) -> dict[str, str]:
        """Kernels and drafter; the head is tied to the embedding and stays bfloat16."""
        decoder = self.target.decoder
        facts = {"version": f"specpress {version('specpress')}", "kernels": decoder.kernels}
        if self.draft is not None:
            facts["draft"] = f"{self.options.draft.name}, as it was trained (bfloat16)"
        if self.options.drafter == "lookup":
            facts["n-grams"] = f"up to {LookupDrafter().max_ngram} tokens"
        return facts | {"threads": str(decoder.threads)}

    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """The new tokens are turned into text as well: `generate` returns both."""
        length = 0 if self.options.drafter == "none" else draft_length
        if length not in self.speculators:
            self.speculators[length] = Speculator(self.target, self._drafter(), length)
        [result] = self.speculators[length].generate([prompt], max_new_tokens=new_tokens, stop=())
        return result.tokens

    def _drafter(self) -> Model | Drafter | None:
        made: dict[str, Callable[[], Drafter]] = {"lookup": LookupDrafter, "suffix": SuffixDrafter}
        return made[self.options.drafter]() if self.options.drafter in made else self.draft


if __name__ == "__main__":
    serve(Specpress)
