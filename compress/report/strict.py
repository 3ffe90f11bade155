"""What the parts of report.json have in common."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen, without unknown keys and without NaN. Every key must be there: null is said, not left out."""

    # Fields are written in the order in which a class names them; `class_` and `schema_` without their underscores.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.rstrip("_"),
        populate_by_name=True,
    )
