"""Making a certificate, and comparing two.

Each text is decoded plainly and by every drafter of the run; one digest stands for all of them, or they are listed as
differing.
"""

import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np

from runtime.audit.certificate import Certificate, CertificateMachine, CertifiedText
from runtime.bench.digest import NoDigestError, differing, digests
from runtime.model.base import BaseDecoder
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.by_name import make

if TYPE_CHECKING:
    from runtime.model.load import Model

# Few and short: a certificate takes some forwards of the target, whatever its size.
PROMPTS, LONGEST, NEW_TOKENS, DRAFT_LENGTH = 2, 64, 16, 4
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def certify(
    target: "Model",
    draft: "Model | None",
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str],
    new_tokens: int = NEW_TOKENS,
    draft_length: int = DRAFT_LENGTH,
) -> Certificate:
    """The certificate of a target with these drafters, by their names; of the first prompts, the ends of long ones.

    Raises UserError for a drafter that cannot be made, and logits that are no numbers.
    """
    kept = [list(prompt)[-LONGEST:] for prompt in prompts[:PROMPTS]]
    made: dict[str, Drafter] = {name: make(target, name, draft) for name in drafters}
    texts = []
    for sampling in (Sampling(), SAMPLED):
        plain = _decoded(target, None, kept, sampling, new_tokens, draft_length)
        others = {
            name: _decoded(target, drafter, kept, sampling, new_tokens, draft_length) for name, drafter in made.items()
        }
        for number, tokens in enumerate(plain):
            alike = [name for name, found in others.items() if found[number] == tokens]
            texts.append(
                CertifiedText(
                    prompt=number,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                    tokens=len(tokens),
                    sha256=digest(tokens),
                    drafters=alike,
                    differing=[name for name in others if name not in alike],
                )
            )
    logits, why = _logits(target)
    return Certificate(
        prompts=kept,
        new_tokens=new_tokens,
        draft_length=draft_length,
        texts=texts,
        logits=logits,
        logits_why=why,
        machine=_machine(target),
    )


def compare(expected: Certificate, found: Certificate) -> list[str]:
    """What a repetition gave otherwise, in words; nothing where it is equal. Logits count where both have digests."""
    wrong = []
    for number, (before, now) in enumerate(zip(expected.texts, found.texts, strict=True), 1):
        how = "greedy" if before.temperature == 0 else f"temperature {before.temperature:g}, seed {before.seed}"
        if before.sha256 != now.sha256:
            wrong.append(f"tokens of text {number} ({how}) are others")
        if now.differing:
            wrong.append(f"text {number} ({how}) differs between plain decoding and {', '.join(now.differing)}")
    if expected.logits and found.logits and (parts := differing(found.logits, expected.logits)):
        wrong.append(f"logits differ: {', '.join(parts)}")
    return wrong


def digest(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, in hexadecimal."""
    return hashlib.sha256(np.array(tokens, dtype="<i8").tobytes()).hexdigest()


def _decoded(
    target: "Model",
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    new_tokens: int,
    draft_length: int,
) -> list[list[int]]:
    made = Speculator(target, drafter, draft_length)
    return [result.tokens for result in made.generate(prompts, new_tokens, sampling=sampling, stop=())]


def _logits(target: "Model") -> tuple[dict[str, str] | None, str | None]:
    try:
        return digests(target.decoder), None
    except NoDigestError as error:
        return None, str(error)


def _machine(target: "Model") -> CertificateMachine:
    decoder = target.decoder
    versions = {"python": platform.python_version()}
    for package in ("specpress", "torch", "numpy", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return CertificateMachine(
        architecture=platform.machine(),
        kernels=decoder.kernels,
        everywhere=isinstance(decoder, BaseDecoder) and decoder.kernel.everywhere,
        versions=versions,
    )
