"""Which ways of decoding are compared: engines, what drafts for them, and how far."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Way:
    """One engine with one drafter.

    engine        as tables print it.
    worker        module in workers/.
    peer          runs in the peers' environment; False: in ours.
    drafter       "none", "model", "lookup" or, ours only, "suffix".
    schedule      whether the engine can choose draft lengths itself.
    draft_length  tokens drafted a round; None: the engine's own schedule, or nothing is drafted.
    """

    engine: str
    worker: str
    peer: bool
    drafter: str
    schedule: bool = False
    draft_length: int | None = None

    @property
    def name(self) -> str:
        """Engine and drafter."""
        return self.engine if self.drafter == "none" else f"{self.engine}, {self.drafter}"

    @property
    def length(self) -> str:
        """The draft length as tables print it."""
        if self.drafter == "none":
            return "-"
        return "own" if self.draft_length is None else str(self.draft_length)


OURS = "specpress"
# Plain decoding first: an engine's own text is what its speculative texts are held against.
WAYS = (
    Way(OURS, "specpress_generate", False, "none"),
    Way(OURS, "specpress_generate", False, "model", schedule=True),
    Way(OURS, "specpress_generate", False, "lookup", schedule=True),
    Way(OURS, "specpress_generate", False, "suffix", schedule=True),
    Way("transformers", "transformers_generate", False, "none"),
    Way("transformers", "transformers_generate", False, "model", schedule=True),
    Way("transformers", "transformers_generate", False, "lookup"),
    Way("openvino", "openvino_generate", True, "none"),
    Way("openvino", "openvino_generate", True, "model", schedule=True),
    Way("openvino", "openvino_generate", True, "lookup"),
    Way("llama.cpp", "llama_cpp_generate", True, "none"),
    Way("llama.cpp", "llama_cpp_generate", True, "lookup"),
)
ENGINES = tuple(dict.fromkeys(way.engine for way in WAYS))
PRECISIONS = {
    OURS: "int8 weights (the int8-dynamic recipe), head as trained",
    "transformers": "float32, the models as they were trained",
    "openvino": "OpenVINO GenAI, int8 weights, the head's and the draft's too",
    "llama.cpp": "llama-cpp-python, Q8_0, the head's too",
}


def with_lengths(way: Way, lengths: Sequence[int]) -> list[Way]:
    """The way at each of the draft lengths, and with its own schedule where it has one."""
    if way.drafter == "none":
        return [way]
    own = [way] if way.schedule else []
    return [replace(way, draft_length=length) for length in lengths] + own
