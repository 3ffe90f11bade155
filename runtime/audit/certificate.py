"""The lossless certificate of a run: what was decoded, and digests of it, so that any machine can repeat it.

certify.py makes one, and compares two; here is what it holds, which reading a report takes no torch for.

Digests of tokens are SHA-256 over little-endian int64 ids; those of logits are runtime/bench/digest.py's.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Parts of a certificate."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CertifiedText(Strict):
    """One text: the number of its prompt, how it was sampled, its tokens' digest and number, and who drafted it alike.

    differing  drafters that gave other tokens; none where speculation is lossless.
    """

    prompt: int
    temperature: float
    top_p: float
    seed: int
    tokens: int
    sha256: str
    drafters: list[str]
    differing: list[str]


class CertificateMachine(Strict):
    """Where it was made: architecture, kernels and whether their bits are the same on every machine, versions."""

    architecture: str
    kernels: str
    everywhere: bool
    versions: dict[str, str]


class Certificate(Strict):
    """What was decoded, and what came of it.

    prompts  as token ids; new_tokens of each text, draft_length (γ) of all drafters.
    logits   digests by kind of cache and part of a fixed text; null where the bits are the machine's own: `why`.
    """

    schema_version: Literal[1] = 1
    prompts: list[list[int]]
    new_tokens: int
    draft_length: int
    texts: list[CertifiedText]
    logits: dict[str, str] | None
    logits_why: str | None
    machine: CertificateMachine

    @property
    def drafters(self) -> list[str]:
        """Who drafted."""
        return sorted({name for text in self.texts for name in (*text.drafters, *text.differing)})
