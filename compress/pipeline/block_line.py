"""What one block came to, in a line for people."""

import statistics as mathematics
from collections.abc import Sequence

from compress.records import LayerRecord


def line(number: int, count: int, records: Sequence[LayerRecord], seconds: float) -> str:
    """The block `number` of `count`, from 0, and its layers' errors."""
    text = f"block {number + 1} of {count}"
    if records:
        outputs = [record.output_error for record in records if record.output_error is not None]
        worst = max(records, key=lambda record: record.output_error or record.error)
        errors = outputs or [record.error for record in records]
        what = "output error" if outputs else "weight error"
        text += f": mean {what} {mathematics.mean(errors):.4f}, most {max(errors):.4f} in {worst.name}"
    return f"{text}, {seconds:.1f} s"
