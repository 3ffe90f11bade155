"""An audit on the terminal and as an HTML page."""

from collections.abc import Iterator, Sequence
from html import escape

from rich import box
from rich.console import Console
from rich.markup import escape as no_markup
from rich.table import Table

from runtime.audit.report import Audit, GreedyRow, SamplingRow

_COLUMNS = ("check", "with", "texts", "tokens", "tests", "result")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.3rem .6rem;text-align:left}"
    ".lossless{color:#0a6b2d}.differs{color:#a30000}"
)


def show(audit: Audit, out: Console) -> None:
    """The table, what was skipped, and the verdict in one line."""
    table = Table(box=box.SIMPLE)
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in ("texts", "tokens", "tests") else "left")
    for row in rows(audit):
        table.add_row(*map(no_markup, row))
    out.print(table)
    for line in audit.skipped:
        out.print(f"not checked: {line}", markup=False)
    out.print(f"{audit.verdict}: {audit.sentence}", markup=False, soft_wrap=True)


def rows(audit: Audit) -> Iterator[Sequence[str]]:
    """A row for each check."""
    for greedy in audit.greedy:
        yield "greedy", greedy.way, str(greedy.texts), "", "", _greedy(greedy)
    for sampled in audit.sampling:
        drafts = "with drafts" if sampled.drafts else "without drafts"
        counts = (str(sampled.requests), str(sampled.tokens), str(sampled.tests))
        yield f"sampling, {sampled.setting}", drafts, *counts, _sampled(sampled)
    for entry in audit.logprobs:
        drafts = "with drafts" if entry.drafts else "without drafts"
        yield "log-probabilities", drafts, "", str(entry.tokens), "", f"off by up to {entry.largest:.2g} nats"


def page(audit: Audit) -> str:
    """The same as one HTML file that needs nothing else."""
    head = "".join(f"<th>{escape(column)}</th>" for column in _COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows(audit))
    skipped = "".join(f"<p>Not checked: {escape(line)}</p>\n" for line in audit.skipped)
    versions = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Audit of {escape(audit.engine)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>Is its speculation lossless?</h1>\n"
        f"<p>{escape(audit.engine)}, {escape(audit.date)}</p>\n"
        f'<p class="{audit.verdict.split()[0]}"><strong>{audit.verdict}</strong>: {escape(audit.sentence)}</p>\n'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n{skipped}"
        f"<p>{audit.requests} requests in {audit.seconds:g} s. Greedy texts are compared with"
        f" {escape(audit.greedy_reference)}. A total variation of {audit.effect:g} between what is sampled and the"
        f" model's distribution would have been found.</p>\n<p>{escape(versions)}</p>\n</body></html>\n"
    )


def _greedy(row: GreedyRow) -> str:
    if row.first_difference is None:
        return "equal"
    return f"{row.texts - row.equal} differ: {row.first_difference}"


def _sampled(row: SamplingRow) -> str:
    if row.accused:
        return f"not the model's: {row.accused[0].test} (p = {row.accused[0].p:.1g}), {len(row.accused)} tests in all"
    if row.tokens < row.tokens_needed:
        return f"too few: {row.tokens_needed} tokens are needed"
    return "the model's"
