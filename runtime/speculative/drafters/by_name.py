"""A drafter by its name, as the commands take it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.checkpoints import block_draft, medusa
from runtime.checkpoints.heads.open import kind_of
from runtime.checkpoints.heads.record import HEAD_KINDS, HeadKind
from runtime.checkpoints.locate import locate
from runtime.contract import no_drafts
from runtime.errors import UserError
from runtime.files import regular
from runtime.model.load import load
from runtime.sampling.detokenize import encode_plain, require_same_vocabulary
from runtime.speculative.draft import Drafter, parts
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import load_network
from runtime.speculative.drafters.fallback import ChainedDrafter, ChosenDrafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads
from runtime.speculative.drafters.nested import NestedDrafter
from runtime.speculative.drafters.other_tokenizer import model_drafter
from runtime.speculative.drafters.published import PublishedDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import Growth, TreeShape
from runtime.speculative.heads.load import load_head
from runtime.speculative.measured import Prior
from runtime.speculative.recorded import Recorded, recorded
from runtime.speculative.verify import Rule

if TYPE_CHECKING:
    from runtime.model.load import Model

AUTO = "auto"


# Drafters that were trained beside their target: the description in their directory, and the recipe's stage.
_TRAINED = {"medusa": (medusa.DESCRIPTION, "medusa"), "block": (block_draft.DESCRIPTION, "block-draft")}
# Drafters whose --draft is the directory of what was trained for the target.
HEADS: tuple[str, ...] = (*_TRAINED, *HEAD_KINDS)


@dataclass(frozen=True)
class NamedDrafter:
    """What a `Speculator` takes as its draft, what is to be said after the drafter's name, and what is known of it."""

    drafter: "Model | Drafter | None"
    note: str = ""
    prior: Prior | None = None


def drafter_by_name(
    target: "Model",
    name: str | None = None,
    draft: str | Path | None = None,
    corpus: Path | None = None,
    verify: Rule = "coupled",
    options: dict[str, Any] | None = None,
    tree: str | None = None,
) -> NamedDrafter:
    """The drafter of this name: none, model, tree, lookup, suffix, nested, medusa, block, eagle3, peagle, dflash,
    dspark, mtp, or several.

    With a plus between them the second drafts where the first finds nothing; with commas who gains most drafts, chosen
    round by round and for each text (choice.Choice); "auto" chooses among lookup and what the target comes with.

    nested needs a target that was loaded with planes=True. A target that cannot verify drafts gets none, and the note
    says why.

    name     None: `draft` where it is given, as a model or as the published head that it is; else who was the fastest
             when the target's run was measured, "none" included, where its report says so; otherwise block where the
             run has one, model where there is a draft, medusa where there are heads, else lookup.
    draft    the directory of the draft model, of what medusa or block were trained to, or of a published head; None:
             the target's own, where its run folder has one, and of mtp its checkpoint.
    corpus   a text file for suffix.
    verify   the rule that will verify.
    options  of `load`, for the draft model.
    tree     a fixed shape for the drafter tree, "2,2,1,1"; None: its trees grow where they are most probable.

    Raises UserError for a draft or a corpus that the drafter does not use, a draft that it lacks or that does not fit,
    a file that cannot be read, and an unknown name.
    """
    chosen, said = (name, "") if name is not None else _default(target, draft)
    if chosen == AUTO:
        chosen = candidates(target, draft)
    kinds = parts(chosen)
    uses_draft = "model" in kinds or "tree" in kinds
    heads = None if uses_draft else next((kind for kind in kinds if kind in HEADS), None)
    uses_heads = heads is not None
    found = draft if draft is not None else target.draft_path
    if draft is not None and not (uses_draft or uses_heads):
        raise UserError(f"--draft names a model, but --drafter is {chosen}; leave out one of the two.")
    if corpus is not None and "suffix" not in kinds:
        raise UserError(f"--corpus is for the drafter suffix, but --drafter is {chosen}; leave out the corpus.")
    if tree is not None and "tree" not in kinds:
        raise UserError(f"--tree is for the drafter tree, but --drafter is {chosen}; leave out the shape.")
    if uses_draft and found is None:
        raise UserError(
            f"--drafter {chosen} needs a draft, but {target.path.name} comes without one; give --draft DIR."
        )
    if kinds != ["none"] and (why := no_drafts(target.decoder)):
        # Nothing is loaded that could not draft.
        return NamedDrafter(None, f" ({why})")
    if kinds == ["none"]:
        return NamedDrafter(None, f" ({said})" if said else "")
    model = load(found, **(options or {})) if uses_draft and found is not None else None
    if model is not None and (why := no_drafts(model.decoder)):
        raise UserError(f"{Path(str(found)).name} cannot draft: {why}; choose another draft.")
    made = make(target, chosen, model, corpus, verify, Path(draft) if uses_heads and draft is not None else None, tree)
    named = model is not None or (draft is not None and heads in HEAD_KINDS)
    notes = [Path(found).name] if named and found is not None else []
    if kinds == ["nested"]:
        notes.append("the target's upper four bits")
    if heads == "mtp" and draft is None:
        notes.append("the target's own layer")
    notes += [said] if said else []
    return NamedDrafter(made, f" ({'; '.join(notes)})" if notes else "", _known(target, chosen, draft))


def _known(target: "Model", drafter: str, draft: str | Path | None) -> Prior | None:
    """What the target's report knows of this drafter, where it is the run's own; None: nothing that can be read."""
    try:
        found = recorded(target.path) if draft is None else None
    except UserError:  # whoever names a drafter needs no report
        return None
    return found.prior if found is not None and found.drafter == drafter else None


def _default(target: "Model", draft: str | Path | None) -> tuple[str, str]:
    """The drafter where none is named, and what is to be said of it."""
    if draft is not None:
        return kind_of(locate(draft)) or "model", ""
    found = recorded(target.path)
    lost = ""
    if found is not None:
        kinds = found.drafter.split("+")
        lacks = ("a draft" if target.draft_path is None and not {"model", "tree"}.isdisjoint(kinds) else "") or (
            "Medusa heads" if target.medusa_path is None and "medusa" in kinds else ""
        )
        lacks = lacks or ("a block drafter" if target.block_path is None and "block" in kinds else "")
        if not lacks:
            return found.drafter, _said(found)
        lost = f"{found.drafter}, the fastest when measured, lacks {lacks}"
    if target.block_path is not None:
        return "block", lost
    if target.draft_path is not None:
        return "model", lost
    if target.medusa_path is not None:
        return "medusa", lost
    return "lookup", lost or "no draft was given, and the target has none"


def _said(found: Recorded) -> str:
    if found.drafter == "none":
        return "no drafter was faster when measured; --drafter names one"
    return f"fastest when measured: {found.speedup:.2f}× plain decoding"


def candidates(target: "Model", draft: str | Path | None) -> str:
    """The name of what "auto" chooses among: what the target comes with, that after lookup, and lookup."""
    if draft is not None:
        own = [kind_of(locate(draft)) or "model"]
    else:
        there = {"block": target.block_path, "model": target.draft_path, "medusa": target.medusa_path}
        own = [name for name, path in there.items() if path is not None]
    return ",".join([*own, *(f"lookup+{name}" for name in own), "lookup"]) if own else "lookup,suffix"


def make(
    target: "Model",
    name: str,
    draft: "Model | None" = None,
    corpus: Path | None = None,
    verify: Rule = "coupled",
    heads: Path | None = None,
    tree: str | None = None,
) -> Drafter:
    """One drafter, or several: see `drafter_by_name`; `draft` is for model and tree.

    heads  the directory of what medusa or block were trained to, or of a published head; None: the target's own.

    Raises UserError as `drafter_by_name`.
    """

    def one(kind: str) -> Drafter:
        if (published := next((known for known in HEAD_KINDS if known == kind), None)) is not None:
            return published_drafter(target, published, heads, verify)
        if kind == "medusa":
            return MedusaDrafter(load_heads(_folder(kind, target, heads, target.medusa_path), target), verify)
        if kind == "block":
            return BlockDrafter(load_network(_folder(kind, target, heads, target.block_path), target), verify)
        if kind == "nested":
            return NestedDrafter(target, verify)
        if kind == "lookup":
            return LookupDrafter()
        if kind == "suffix":
            return SuffixDrafter([] if corpus is None else [_tokens(target, corpus)])
        if kind == "model" and draft is not None:
            return model_drafter(target, draft, verify)
        if kind == "tree" and draft is not None:
            require_same_vocabulary(target.tokenizer, draft.tokenizer)
            plan = Growth() if tree is None else TreeShape.parse(tree)
            return TreeDrafter(draft, plan, verify, target.decoder.vocab_size)
        raise UserError(
            f"drafter must be one of none, model, tree, lookup, suffix, nested, {', '.join(HEADS)}, "
            f"but is {kind}; choose one of them."
        )

    # Chains share them, and with them what each knows of a text.
    made: dict[str, Drafter] = {}

    def chain(names: str) -> Drafter:
        for kind in names.split("+"):
            if kind not in made:
                made[kind] = one(kind)
        own = [made[kind] for kind in names.split("+")]
        return own[0] if len(own) == 1 else ChainedDrafter(own)

    choices = name.split(",")
    if len(set(choices)) < len(choices):
        raise UserError(f"--drafter {name} names a drafter twice; name each once.")
    return chain(name) if len(choices) == 1 else ChosenDrafter([chain(names) for names in choices])


def published_drafter(target: "Model", kind: HeadKind, folder: Path | None, verify: Rule) -> PublishedDrafter:
    """The drafter of a published head in a folder. Raises UserError without one, and as `load_head`."""
    if folder is None and kind != "mtp":
        raise UserError(f"--drafter {kind} needs a head that was made for {target.path.name}; give --draft DIR.")
    head = load_head(target.path if folder is None else locate(str(folder)), kind, target)
    return PublishedDrafter(head, head.about.at(target.decoder.layers), verify)  # type: ignore[attr-defined]


def _folder(kind: str, target: "Model", named: Path | None, own: Path | None) -> Path:
    """Where a trained drafter is: the directory itself, or the one of its kind in a run folder."""
    description, stage = _TRAINED[kind]
    if named is None:
        if own is None:
            what = "heads" if kind == "medusa" else "a directory of its own"
            raise UserError(
                f"--drafter {kind} needs {what}, but {target.path.name} comes without; compress it by a recipe with a "
                f"{stage} stage, or give --draft DIR."
            )
        return own
    inner = named / kind
    return inner if (inner / description).is_file() else named


def _tokens(target: "Model", corpus: Path) -> list[int]:
    try:
        text = regular(corpus).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--corpus: {corpus} is not a text file that can be read; give a UTF-8 file.") from error
    return encode_plain(target.tokenizer, text)
