"""Which divergence aligns a draft best: agreement and acceptance before and after, one row a loss.

    python examples/compare/draft_losses.py runs/int4-rtn --minutes 15 --work runs/draft-losses
    python examples/compare/draft_losses.py runs/ternary --losses forward_kl,reverse_kl --tokens 500000

RUN is a run folder with a packed model/ and a draft/. Every loss starts from that draft, with the same budget, seed and
text. The best weights are chosen on held-out windows; what the table says is measured on others.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from calib import corpora, training_text
from calib.prompts import prompts
from calib.training_text import Measured
from calib.windows import make_windows
from compress.artifact.files import write_json
from compress.distill.acceptance import Acceptance, measure
from compress.errors import USER_ERRORS
from compress.progress import show
from compress.recipe.training_stages import Draft
from compress.training.precision import has_bfloat16

LOSSES = ("forward_kl", "reverse_kl", "jsd", "total_variation", "minillm")
LENGTH, HELD_OUT, EVALUATION = 256, 32, 64
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 64, 64


@dataclass(frozen=True)
class Row:
    """One loss: how well the draft predicts the target before and after, and what that took."""

    loss: str
    before: Acceptance
    after: Acceptance
    steps: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        sides = {"before": asdict(self.before), "after": asdict(self.after)}
        return {"loss": self.loss, **sides, "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row a loss, before -> after."""
    head = "| loss | greedy acceptance, 4 drafted | agreement | agreement at T = 1 | tokens |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {row.loss} | {_arrow(row.before.acceptance_rate, row.after.acceptance_rate)} | "
        f"{_arrow(row.before.agreement, row.after.agreement)} | "
        f"{_arrow(row.before.agreement_t1, row.after.agreement_t1)} | {row.tokens:,} |\n"
        for row in rows
    )


def _arrow(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "nothing was drafted"
    return f"{before:.3f} -> {after:.3f} ({after - before:+.3f})"


def compare(run: Path, losses: Sequence[str], keys: dict[str, Any], source: str, work: Path, seed: int) -> list[Row]:
    """Trains the run's draft with each loss, in a folder of its own in `work`; keys are the stage's others."""
    from compress.context import RunContext
    from compress.distill import draft
    from compress.recipe import Recipe
    from compress.training.contract import StageContext
    from runtime import load

    target, start = load(run / "model"), load(run / "draft")
    tokenizer, corpus = target.tokenizer, corpora.load()
    separator = tokenizer.eos_token_id
    cut = {"length": LENGTH, "calibration": HELD_OUT, "evaluation_tokens": EVALUATION * LENGTH}
    cut |= {"seed": seed, "separator": separator}
    windows = make_windows(corpus, tokenizer, **cut)
    texts = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in prompts(corpus, PROMPTS, seed)]
    before = measure(target, start, windows.evaluation, texts, NEW_TOKENS)
    rows = []
    with show() as shown:
        text = training_text.gather(source, Measured(None, corpus, tokenizer, **cut))
        about = {"length": LENGTH, "separator": separator, "progress": shown}
        tokens = training_text.tokenize(text, tokenizer, work / "text", **about)
        for loss in losses:
            stage = Draft.model_validate({**keys, "loss": loss})
            began = time.monotonic()
            context = StageContext(
                run=RunContext(Recipe.load("int4-aligned-draft"), seed=seed, progress=shown, note=shown.note),
                original=run / "model",
                model=run / "model",
                draft=run / "draft",
                tokens=tokens,
                held_out=windows.calibration,
                work=work / loss,
                settings=stage.training.settings(seed, has_bfloat16("cpu")),
                budget=stage.training.budget(),
            )
            told = draft.run(stage, context, work / f"{loss}-draft")
            after = measure(target, load(work / f"{loss}-draft"), windows.evaluation, texts, NEW_TOKENS)
            rows.append(Row(loss, before, after, told["steps"], told["tokens"], time.monotonic() - began))
    return rows


def main() -> int:
    """Prints the table, and writes it as JSON into the work folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder with model/ and draft/")
    parser.add_argument("--losses", default=",".join(LOSSES), help="names, with commas between them")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="of training for each loss, the target's samples included")
    budget.add_argument("--tokens", type=int, help="to train on, for each loss")
    parser.add_argument("--source", default="stdlib", help="text to train on: stdlib, python, a file or a dataset")
    parser.add_argument("--work", type=Path, default=Path("runs/draft-losses"), help="where drafts and text are kept")
    parser.add_argument("--stage", default="{}", help="other keys of the stage draft, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    losses = chosen.losses.split(",")
    unknown = [loss for loss in losses if loss not in LOSSES]
    if unknown:
        parser.error(f"--losses: expected some of {', '.join(LOSSES)}, found {', '.join(unknown)}")
    keys = json.loads(chosen.stage)
    limits = {"minutes": chosen.minutes, "tokens": chosen.tokens}
    keys["training"] = {**keys.get("training", {}), **{key: value for key, value in limits.items() if value}}
    try:
        rows = compare(chosen.run, losses, keys, chosen.source, chosen.work, chosen.seed)
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        return 2
    write_json(chosen.work / "draft_losses.json", [row.to_dict() for row in rows])
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
