"""`bench speculate --protocol speed-bench`."""

from dataclasses import replace
from typing import Any

from typer import echo

from runtime.bench.jobs import facts_of, opened_job, say
from runtime.bench.options import SpeculateOptions, numbers
from runtime.bench.output import show_speed_bench, write
from runtime.bench.speed_bench import cells, fitting, measure
from runtime.bench.speed_bench_files import write as write_cell
from runtime.errors import UserError

PROTOCOL = "speed-bench"
# As in its own examples. A γ that changes would give positions of a draft another meaning each round.
DRAFT_LENGTH = 3
REQUESTS = 16


def speed_bench(options: SpeculateOptions) -> None:
    """Measures, shows and writes the protocol. Raises UserError for what it cannot be measured on."""
    if options.protocol != PROTOCOL:
        raise UserError(f"--protocol must be {PROTOCOL}, found {options.protocol!r}; name that or leave it out")
    if options.target is None or options.prompts is None:
        raise UserError(
            "speed-bench needs a --target and real --prompts: on random ones drafts are accepted otherwise than on any"
            " text; `specpress prompts prompts.jsonl` writes some"
        )
    if options.temperature or options.schema is not None or options.batch != 1:
        raise UserError("speed-bench is greedy, without a schema, and sets --batch itself; leave these options out")
    if options.out is not None and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UserError(f"--out: {options.out} is there already; name a new folder")
    lengths = numbers("--lengths", options.lengths, 1 << 20)
    concurrency = numbers("--concurrency", options.concurrency, 256)
    fixed = replace(options, draft_length=DRAFT_LENGTH if options.draft_length is None else options.draft_length)
    with opened_job(fixed) as (job, model):
        if lost := sorted(set(lengths) - set(fitting(job, lengths))):
            said = ", ".join(map(str, lost))
            echo(f"inputs of {said} tokens are left out: the model has {job.decoder.max_positions} positions", err=True)
        planned = list(cells(job, lengths, concurrency, REQUESTS, options.seed))
        facts = facts_of(job, model) | {"protocol": PROTOCOL}
        about: dict[str, Any] = {
            "drafter": job.drafter.name,
            "draft": None if options.draft is None else model.path.parent.joinpath(options.draft).name,
            "target": model.path.name,
            "draft_length": fixed.draft_length,
            "conditions": {**facts, "new_tokens": job.new_tokens, "prompts": options.prompts.name, "temperature": 0.0},
        }
        rows, categories = [], dict[str, float]()
        for found in measure(job, planned, options.rounds, say):
            rows.append(found.row())
            if found.cell.split == "qualitative":
                categories = found.categories
            if options.out is not None:
                write_cell(options.out, found, about, model.tokenizer.decode)
    show_speed_bench(facts, about, rows, categories)
    if options.json_file is not None:
        write(options.json_file, facts | {"about": about, "categories": categories, "rows": rows})
