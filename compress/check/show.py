"""The result of a check in the terminal."""

from collections.abc import Iterator

from compress.check.findings import Coverage, Result

_STYLES = {"good": "green", "suspicious": "yellow", "broken": "red", "note": "dim"}
_MOST = 30


def show(result: Result) -> None:
    """Prints the verdict, the findings, what is covered, which engines load it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(f"{result.folder}: {result.verdict}", style=f"bold {_STYLES[result.level]}"))
    for finding in result.findings[:_MOST]:
        console.print(Text.assemble((f"  {finding.level:<10}  ", _STYLES[finding.level]), finding.sentence))
    if len(result.findings) > _MOST:
        console.print(f"  and {len(result.findings) - _MOST} more findings: --json has them all")
    console.print()
    for line in covered(result.coverage):
        console.print(f"  {line}")
    if error := errors(result):
        console.print(f"  {error}")
    if result.depth is not None:
        console.print(f"  {depth(result)}")
    table = Table(box=None, pad_edge=True, show_header=False)
    for engine in result.engines:
        loads = {True: "loads", False: "no", None: "perhaps"}[engine.loads]
        table.add_row(engine.name, loads, engine.why)
    console.print()
    console.print(table)


def covered(coverage: list[Coverage]) -> Iterator[str]:
    """One line for each way of storing: which layers, how many bits."""
    ways: dict[str, list[Coverage]] = {}
    for row in coverage:
        ways.setdefault(row.stored, []).append(row)
    total = sum(row.weights for row in coverage)
    for stored, rows in ways.items():
        weights = sum(row.weights for row in rows)
        bits = sum(row.weights * row.bits for row in rows) / weights
        kinds = ", ".join(dict.fromkeys(row.kind for row in rows))
        yield f"{weights / total:>6.1%} of the weights: {stored}, {bits:.2f} bits a weight: {kinds}"
    if total:
        mean = sum(row.weights * row.bits for row in coverage) / total
        yield f"all {total / 1e6:,.1f} M weights: {mean:.2f} bits a weight"


def errors(result: Result) -> str:
    """The range of the packed weights' errors."""
    factors = [weight.factor for weight in result.weights if weight.factor is not None]
    if not factors:
        return ""
    found = [weight.error for weight in result.weights if weight.error is not None and weight.packed]
    return (
        f"relative errors of packed weights {min(found):.3g} to {max(found):.3g}:"
        f" {min(factors):.2f} to {max(factors):.2f} times those of rounding to nearest"
    )


def depth(result: Result) -> str:
    """What the text came to."""
    found = result.depth
    if found is None:
        return ""
    blocks = ", ".join(f"{error:.3g}" for error in found.inherited)
    said = f"{found.tokens} tokens of {found.text}: hidden states off by {blocks} after each block"
    if found.kl_divergence is None or found.top1_agreement is None:
        return said
    agreement = f"top-1 agreement {found.top1_agreement:.1%} ({found.flips} flips)"
    return f"{said}; KL {found.kl_divergence:.3g} nats, {agreement}"
