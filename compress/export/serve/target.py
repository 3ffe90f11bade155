"""What an engine is given of a run: which form of the target, which drafter. And the words for it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from inspect import signature

from compress.export import refusal, told
from compress.export.serve.parts import Command
from compress.export.serve.run_facts import DRAFTS, Facts
from runtime.speculative.drafters.lookup import LookupDrafter

# Of our drafters those that need no model: other engines call theirs n-grams, or prompt lookup.
_OF_THE_TEXT = ("lookup", "suffix")


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
    there = [form for form in forms if form in facts.exports]
    possible = there or [form for form in forms if refusal(form, facts.kinds) is None]
    return exported(facts, possible[0]) if possible else None


def exported(facts: Facts, *forms: str, file: str = "", draft: bool = False) -> Source:
    """The first of the forms of the target, or of its draft, that is there; else the first, which has to be made."""
    there = facts.draft_exports if draft else facts.exports
    form = next((form for form in forms if form in there), forms[0])
    folder, what = (DRAFTS, "draft") if draft else ("exports", "model")
    words = f"draft --to {form} --out {DRAFTS}" if draft else f". --to {form}"
    need = Command(f"the {what} as {form}", f"python -m compress.export {words}")
    return Source(f"{folder}/{form}/{file}".rstrip("/"), None if form in there else need)


def needs(*sources: Source | None) -> tuple[Command, ...]:
    """The commands that make what is not there."""
    return tuple(source.need for source in sources if source is not None and source.need is not None)


def drafts(facts: Facts) -> bool:
    """Whether the run's draft is to draft for its target in another engine: it can, and the text itself was no faster
    drafter."""
    return facts.draft and facts.vocabulary != "different" and facts.fastest not in _OF_THE_TEXT


def longest_ngram() -> int:
    """The longest suffix that our own prompt lookup looks for, which the report's figures stand on."""
    return int(signature(LookupDrafter).parameters["max_ngram"].default)


def contents(facts: Facts) -> str:
    """What the weights are, in words."""
    if not facts.kinds:
        return "plain weights"
    if facts.kinds <= {"int8", "int6", "int4"}:
        text = f"integers of {' and '.join(map(str, facts.bits))} bits"
    elif "fp8" in facts.kinds:
        text = " and ".join(sorted(facts.kinds))
    else:
        text = "nf4" if facts.kinds == {"nf4"} else f"{' and '.join(sorted(facts.kinds))} weights"
    details = told(
        facts.method,
        facts.group and f"in groups of {facts.group}",
        facts.asymmetric and "with zero points",
        facts.reordered and "in activation order",
        facts.activations != "none" and f"inputs rounded ({facts.activations})",
    )
    return f"{text} ({', '.join(details)})"


def drafting_lines(facts: Facts) -> tuple[str, ...]:
    """What every engine's user has to know of the drafter."""
    return told(
        facts.draft
        and facts.fastest in _OF_THE_TEXT
        and f"The drafter {facts.fastest} was faster than the model in draft/ when the run was measured, so n-grams of"
        " the text draft.",
        facts.draft
        and facts.vocabulary == "different"
        and "The draft's vocabulary is not the target's, so it is not used here: n-grams of the text draft.",
        facts.draft
        and facts.vocabulary == "unknown"
        and "A draft must have the target's vocabulary; there is no tokenizer.json to compare: check it.",
    )


def float_cache_line(facts: Facts) -> str | None:
    """For engines that keep keys and values as they like."""
    if facts.cache is None:
        return None
    return f"Keys and values are not kept in {facts.cache} here: the scheme is our runtime's."


def one_part_line(facts: Facts) -> str | None:
    """For engines that cut a model in two."""
    if facts.tensor_parallel > 1:
        return None
    return "Heads or groups of weights cannot be cut in two, so tensor parallelism stays at 1."
