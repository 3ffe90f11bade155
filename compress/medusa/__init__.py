"""The stage `medusa`: heads for the packed model as it is (Medusa-1), or trained together with it (Medusa-2)."""

from pathlib import Path
from typing import Any

from compress.medusa.frozen import run_frozen
from compress.medusa.joint import run_joint
from compress.recipe.training_stages import Medusa
from compress.training.contract import StageContext


def run(stage: Medusa, context: StageContext, out: Path) -> dict[str, Any]:
    """Trains heads for the packed model in `context.model` and writes them to `out`; what the report says of it.

    Raises UserError for a text that is too short, and as the training loop does.
    """
    return run_joint(stage, context, out) if stage.kind == "medusa-2" else run_frozen(stage, context, out)
