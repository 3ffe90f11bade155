"""Run folders for tests: what `specpress compress` leaves, with random figures."""

import json
import random
from pathlib import Path
from typing import Any


def random_report(name: str, generator: random.Random) -> dict[str, Any]:
    """The figures of report.json that a list of runs shows."""
    original, plain = generator.uniform(50, 200), generator.uniform(100, 400)
    ratio = generator.uniform(1.5, 6)
    return {
        "schema": 2,
        "recipe": name,
        "model": "tiny",
        "draft": None,
        "asked": {"recipe": {"about": f"about {name}"}},
        "machine": {"cpu": "a processor"},
        "versions": {"specpress": "0.1.0"},
        "size": {
            "original_bytes": 28_000_000,
            "compressed_bytes": round(28_000_000 / ratio),
            "ratio": ratio,
            "bits_per_weight": 16 / ratio,
        },
        "quality": {
            "perplexity": {"original": 12.0, "compressed": 12 + generator.random()},
            "kl_divergence": {"mean": generator.random() / 50},
            "top1_agreement": generator.uniform(0.8, 1),
        },
        "speed": {
            "original": {"tokens_per_second": original},
            "compressed": {"tokens_per_second": plain},
            "speculative": {"tokens_per_second": plain * generator.uniform(0.8, 2)},
            "speedup": {"over_compressed": generator.uniform(0.8, 2)},
            "drafter": "lookup",
            "acceptance_rate": generator.random(),
            "tokens_per_round": generator.uniform(1, 4),
        },
        "lossless": {"class": "exact", "mismatches": 0},
    }


def write_run(folder: Path, generator: random.Random, **changes: Any) -> Path:
    """Writes a run folder; `changes` go into its report.json."""
    folder.mkdir(parents=True)
    report = random_report(folder.name, generator) | changes
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.html").write_text(f"<!doctype html><title>r</title><h1>Report</h1><p>{report['size']}</p>")
    (folder / "recipe.yaml").write_text(f"name: {folder.name}\n")
    return folder
