"""What an engine is given of a run: which form of the target, which drafter. And the words for it."""

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from inspect import signature

from compress.export.serve.parts import Command
from compress.export.serve.run_facts import DRAFTS, Facts
from runtime.speculative.drafters.lookup import LookupDrafter


@dataclass(frozen=True)
class Source:
    """A form of the target. path: from the run folder on; need: the command that makes it, where it is not there."""

    path: str
    need: Command | None = None


def target(facts: Facts, accepted: Collection[str | None], forms: Sequence[str]) -> Source | None:
    """The model itself where the engine reads its method, else the first export of `forms` that is there or can be.

    accepted  `quant_method`s, None standing for plain weights.
    """
    if facts.method in accepted:
        return Source("model")
    for form in forms:
        if form in facts.exports:
            return Source(f"exports/{form}")
    return next((export(form) for form in forms if _possible(form, facts)), None)


def exported(facts: Facts, *forms: str, file: str = "") -> Source:
    """The first of the target's forms that is there, else the first, which has to be made."""
    there = next((form for form in forms if form in facts.exports), None)
    found = export(forms[0]) if there is None else Source(f"exports/{there}")
    return Source(f"{found.path}/{file}" if file else found.path, found.need)


def exported_draft(facts: Facts, *forms: str, file: str = "") -> Source:
    """The same of the draft's."""
    there = next((form for form in forms if form in facts.draft_exports), None)
    form = there or forms[0]
    words = ("python", "-m", "compress.export", "draft", "--to", form, "--out", DRAFTS)
    need = None if there else Command(f"the draft as {form}", words)
    path = f"{DRAFTS}/{form}"
    return Source(f"{path}/{file}" if file else path, need)


def export(form: str) -> Source:
    """An export that has to be made."""
    return Source(f"exports/{form}", Command(f"the model as {form}", _export_words(form)))


def _export_words(form: str) -> tuple[str, ...]:
    return ("python", "-m", "compress.export", ".", "--to", form)


def _possible(form: str, facts: Facts) -> bool:
    from compress.export import FORMATS

    if "fp8" in facts.kinds and form != "compressed-tensors":
        return False
    refusal = getattr(importlib.import_module(FORMATS[form].split(":")[0]), "refusal", None)
    return refusal is None or refusal(facts.kinds) is None


def needs(*sources: Source | None) -> tuple[Command, ...]:
    """The commands that make what is not there."""
    return tuple(source.need for source in sources if source is not None and source.need is not None)


def drafts(facts: Facts) -> bool:
    """Whether the run's draft can draft for its target in another engine."""
    return facts.draft and facts.vocabulary != "different"


def longest_ngram() -> int:
    """The longest suffix that our own prompt lookup looks for, which the report's figures stand on."""
    return int(signature(LookupDrafter).parameters["max_ngram"].default)


def contents(facts: Facts) -> str:
    """What the weights are, in words."""
    if not facts.kinds:
        return "plain weights"
    if facts.kinds <= {"int8", "int4"}:
        text = f"integers of {' and '.join(map(str, facts.bits))} bits"
    elif "fp8" in facts.kinds:
        text = " and ".join(sorted(facts.kinds))
    else:
        text = "ternary weights" if "ternary" in facts.kinds else "nf4"
    details = [f"in groups of {facts.group}"] if facts.group else []
    details += ["with zero points"] if facts.asymmetric else []
    details += ["in activation order"] if facts.reordered else []
    details += [f"inputs rounded ({facts.activations})"] if facts.activations != "none" else []
    return f"{text} ({facts.method}{''.join(', ' + detail for detail in details)})"


def drafting_lines(facts: Facts) -> list[str]:
    """What every engine's user has to know of the drafter."""
    lines = []
    if facts.draft and facts.vocabulary == "different":
        lines.append("The draft's vocabulary is not the target's, so it is not used here: n-grams of the text draft.")
    elif facts.draft and facts.vocabulary == "unknown":
        lines.append("A draft must have the target's vocabulary; there is no tokenizer.json to compare: check it.")
    return lines
