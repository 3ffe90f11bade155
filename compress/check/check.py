"""`check`: is a compressed model what it should be? Whoever wrote it, in every format that is read here.

Weights are read one at a time, so that a model needs no more memory than its largest weight, a few times.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from compress.check.config import check_config
from compress.check.engines import check_engines
from compress.check.examine import Examined, examine
from compress.check.expected import check_draft_heads, check_names, check_shapes, check_ties, structure_of
from compress.check.findings import Coverage, Finding, Result, judge, sort
from compress.check.judging import judge_alone, judge_weights
from compress.check.opening import Opened, open_loosely
from compress.check.originals import Originals
from compress.check.quantization import check_quantization
from compress.check.rotated import in_basis
from compress.check.texts import check_texts
from compress.errors import UserError
from compress.progress import Progress, silent

# What differs between sentences that say the same; and how many of them are told one by one.
_NAMES, _TOGETHER = re.compile(r"[\w.]*\d[\w.]*"), 4
# Kinds of findings after which the model cannot be run on a text.
_NOT_RUN = frozenset({"file", "missing", "shape", "finite", "unread", "config"})


@dataclass(frozen=True)
class Text:
    """A text to run both models on. file: None for this machine's own; tokens: how many of it; 0: none."""

    file: Path | None = None
    tokens: int = 256


def check(
    folder: str | Path, original: str | Path | None = None, text: Text | None = None, progress: Progress = silent
) -> Result:
    """Checks a model directory, run folder or GGUF file, alone or against the model that it was made of.

    text  None: it is run on no text. Raises UserError where there is no model, or the original is damaged.
    """
    began = time.monotonic()
    opened = open_loosely(folder)
    source = None if original is None else _open_original(original)
    findings = list(opened.findings)
    if source is not None:
        source = in_basis(opened, source, findings)
    originals = None if source is None else Originals(source)
    structure = structure_of(opened, findings)
    findings += check_names(opened, structure, originals)
    examined = list(examine(opened, originals, progress, findings))
    findings += check_shapes(opened, examined, structure, originals)
    findings += judge_alone(examined)
    if originals is not None:
        findings += judge_weights(examined)
        findings += check_draft_heads(opened, structure, originals)
    findings += check_quantization(opened, examined)
    findings += check_ties(opened, originals)
    findings += check_config(opened, source)
    findings += check_texts(opened, source)
    depth = None
    if text is not None and text.tokens and source is not None:
        from compress.check.depth import run_text

        depth, more = run_text(opened, source, text.file, text.tokens, _cannot_run(findings), progress)
        findings += more
    findings = _without_repeats(findings)
    level, verdict = judge(findings)
    return Result(
        folder=opened.shown,
        original=None if source is None else source.shown,
        form=opened.form,
        verdict=verdict,
        level=level,
        findings=sort(findings),
        coverage=_coverage(examined),
        weights=[one.weight for one in examined],
        engines=check_engines(opened, level == "broken"),
        depth=depth,
        seconds=round(time.monotonic() - began, 1),
    )


def _open_original(original: str | Path) -> Opened:
    source = open_loosely(original)
    damage = next((finding for finding in source.findings if finding.level == "broken"), None)
    if damage is not None:
        raise UserError(f"--original {source.shown}: {damage.sentence}; give a sound one")
    return source


def _cannot_run(findings: Sequence[Finding]) -> str | None:
    """Why the model is not run on a text."""
    found = next((f for f in sort(findings) if (f.kind in _NOT_RUN and f.level != "note") or f.kind == "unread"), None)
    return None if found is None else found.sentence


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each place and kind, the first; and where many say the same of many places, one of them."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    seen: set[tuple[str, str]] = set()
    for finding in sort(findings):
        if (finding.kind, finding.where) not in seen:
            seen.add((finding.kind, finding.where))
            alike.setdefault((finding.level, finding.kind, _NAMES.sub("", finding.says)), []).append(finding)
    out = []
    for members in alike.values():
        more = f" and {len(members) - 1} more"
        alone = len(members) <= _TOGETHER
        out += members if alone else [members[0].model_copy(update={"where": members[0].where + more})]
    return out


def _coverage(examined: Sequence[Examined]) -> list[Coverage]:
    """By kind of layer and how it is stored, packed ones first."""
    groups: dict[tuple[bool, str, str], list[Examined]] = {}
    for one in examined:
        groups.setdefault((not one.weight.packed, one.weight.stored, one.weight.kind), []).append(one)
    rows = []
    for (_, stored, kind), of in sorted(groups.items()):
        weights = sum(prod(one.weight.shape) for one in of)
        bits = sum(prod(one.weight.shape) * one.weight.bits for one in of) / max(weights, 1)
        rows.append(Coverage(kind=kind, stored=stored, tensors=len(of), weights=weights, bits=round(bits, 3)))
    return rows


__all__ = ["Result", "Text", "check"]
