"""The command `fleet` of `python -m runtime.bench`: a capacity plan from one replica's figures."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.bench.options import Json, at_least_one, numbers
from runtime.cli import takes
from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.bench.fleet import Load
    from runtime.bench.fleet_figures import Figures

_MOST = 10_000  # replicas, and texts at once
_COSTS = ("ingress", "others")  # of Figures
_AT_REST = 0.2  # of the cores, that other programs may use while a machine is measured
_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Of `fleet`."""

    figures: Annotated[Path, typer.Option(help="A file of one replica's figures; --measure writes it.")]
    measure: Annotated[
        str | None,
        typer.Option(
            help="Address of an idle server or one-replica cluster to measure, such as http://127.0.0.1:8000."
        ),
    ] = None
    together: Annotated[
        str | None,
        typer.Option(
            help="Address of an idle cluster of the first number of replicas, all on this machine of --cores: what they"
            " cost each other is measured, too, and goes into the file."
        ),
    ] = None
    check: Annotated[
        str | None,
        typer.Option(help="Address of a cluster with the first number of replicas: asked for the same, and timed."),
    ] = None
    replicas: Annotated[str, typer.Option(help="Replicas, with commas between the numbers.")] = "1,2,4"
    rates: Annotated[str, typer.Option(help="Requests a second, with commas between the numbers.")] = "1,2,4"
    requests: Annotated[int, typer.Option(help="Requests of each simulation.")] = 500
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128
    shared: Annotated[int, typer.Option(help="Tokens that a prompt begins with as others do.", min=0)] = 0
    prefixes: Annotated[int, typer.Option(help="How many such beginnings there are.")] = 1
    any_replica: Annotated[bool, typer.Option("--any-replica", help="Route as Ray does: by the shorter queue.")] = False
    max_batch: Annotated[int, typer.Option(help="Texts in one forward.")] = 32
    pages: Annotated[int, typer.Option(help="Pages of 64 tokens that a replica keeps.")] = 4096
    cores: Annotated[
        float | None,
        typer.Option(
            help="Of one machine that the replicas, of one thread each, the ingress and the client share.",
            show_default="each replica has a machine",
            min=0.5,
        ),
    ] = None
    price: Annotated[float, typer.Option(help="Of a replica for an hour.", min=0)] = 0.0
    seed: Annotated[int, typer.Option(help="Of arrivals and prefixes.", min=0)] = 0
    json_file: Json = None


@takes(FleetOptions)
def fleet(options: FleetOptions) -> None:
    """Predicts latencies, reuse and cost of replicas at some rates, by simulation. See docs/scale.md."""
    from runtime.bench.fleet import Fleet, simulate
    from runtime.bench.output import console, listed, write

    counts, rates = numbers("--replicas", options.replicas, _MOST), _rates(options.rates)
    names = ("requests", "prompt", "new_tokens", "prefixes", "max_batch", "pages")
    at_least_one({f"--{name.replace('_', '-')}": getattr(options, name) for name in names})
    if options.shared > options.prompt - 1:
        raise UserError(
            f"--shared: {options.shared} of {options.prompt} tokens leave none of a prompt's own; share fewer"
        )
    figures = _figures(options, counts[0])
    one = Fleet(1, options.max_batch, options.pages, not options.any_replica, cores=options.cores, price=options.price)
    asked = _load(options)
    rows: list[dict[str, Any]] = []
    for count, rate in product(counts, rates):
        load = replace(asked, rate=rate)
        row = {"replicas": count, "rate": rate, **asdict(simulate(figures, replace(one, replicas=count), load))}
        if options.check is not None and count == counts[0]:
            from runtime.bench.fleet_ask import checked

            row["measured"] = checked(options.check, load)
        rows.append(row)
    keys = "replicas rate ttft_ms.p50 ttft_ms.p90 latency_ms.p50 latency_ms.p90 tokens_per_second reuse busy imbalance"
    if options.check is not None:
        keys += " measured.p50 measured.p90"
    if options.price:
        keys += " price_per_million"
    out = console(132)
    out.print(listed(keys, rows))
    if options.cores is not None and figures.background > _AT_REST * options.cores:
        out.print(
            f"{figures.background:.1f} of {options.cores:g} cores were busy with other things while nothing was asked:"
            " measure again when the machine is at rest."
        )
    if options.json_file is not None:
        write(options.json_file, {"figures": _plain(figures), "result": rows})


def _load(options: FleetOptions) -> "Load":
    """What is asked, once a second."""
    from runtime.bench.fleet import Load

    return Load(
        1.0, options.requests, options.prompt, options.new_tokens, options.shared, options.prefixes, options.seed
    )


def _figures(options: FleetOptions, replicas: int) -> "Figures":
    """The file's; what is asked for is measured and written first. Raises UserError for a file that is none."""
    from runtime.bench.output import write

    if options.together is not None and options.cores is None:
        raise UserError("--together: of how many cores is the machine? Give --cores, too")
    if options.measure is None:
        found = _read(options.figures)
    else:
        from runtime.bench.fleet_measure import measure

        batches = [one for one in _BATCHES if one <= options.max_batch]
        shared = options.cores is not None
        found = measure(options.measure, batches, options.prompt, options.new_tokens, shared)
        write(options.figures, _plain(found))
    if options.together is not None and options.cores is not None:
        from runtime.bench.fleet import Fleet
        from runtime.bench.fleet_together import together, write_together

        seen = write_together(options.together, replicas, options.cores, _load(options))
        found = together(found, Fleet(replicas, options.max_batch, options.pages, cores=options.cores), seen)
        write(options.figures, _plain(found))
    return found


def _read(file: Path) -> "Figures":
    """A file's figures. Raises UserError for a file that is none."""
    from runtime.bench.fleet_figures import Cost, Figures

    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        rounds = tuple((int(texts), float(seconds)) for texts, seconds in told["rounds"])
        ingress, others = costs = [
            Cost(**{key: float(value) for key, value in told.get(one, {}).items()}) for one in _COSTS
        ]
        early = float(told.get("early", 1.0))
        held, background = (float(told.get(name, 0.0)) for name in ("held", "background"))
        crowd, waver = (tuple(map(float, told.get(name, [usual]))) for name, usual in (("crowd", 1.0), ("waver", 0.0)))
        figures = Figures(
            float(told["overhead"]), float(told["prompt"]), rounds, ingress, others, early, held, background,
            crowd, waver, float(told.get("steady", 0.0)),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--figures: {file} cannot be read ({type(error).__name__}): write it with --measure ADDRESS"
        ) from None
    spent = [value for cost in costs for value in (cost.request, cost.message, cost.token)]
    values = [
        figures.overhead,
        figures.prompt,
        held,
        background,
        figures.steady,
        *waver,
        *(seconds for _, seconds in rounds),
        *spent,
    ]
    rising = bool(rounds) and list(rounds) == sorted(set(rounds)) and rounds[0][0] >= 1
    if not rising or min(values) < 0 or not 0 <= early <= 1 or not waver or not crowd or min(crowd) <= 0:
        raise UserError(f"--figures: {file}: expected seconds, and rounds of rising numbers of texts")
    return figures


def _plain(figures: "Figures") -> dict[str, Any]:
    told = {"rounds": [list(one) for one in figures.rounds], "crowd": list(figures.crowd), "waver": list(figures.waver)}
    return {**asdict(figures), **told}


def _rates(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise UserError(f"--rates: expected numbers above 0 with commas between them, found {text!r}")
    return found
