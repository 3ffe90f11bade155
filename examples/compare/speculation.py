"""The embedded pair, decoded speculatively by Specpress and by its peers, interleaved.

    make peers
    .venv/bin/python examples/compare/speculation.py

Greedy, the same held-out prompts for all. Each engine has processes of its own; only one computes at any moment.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from models import interpreters, require_native_kernels
from ways import ENGINES, OURS, WAYS, Way, with_lengths

from compress.errors import USER_ERRORS
from runtime.bench.options import numbers, say, writable
from runtime.cli import without_traceback
from runtime.errors import UserError

if TYPE_CHECKING:
    from pair import Formats
    from processes import Start

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_PEERS = tuple(engine for engine in ENGINES if engine != OURS)
_MAX_DRAFT_LENGTH = 64
NOTE = (
    "The target's weights are a few megabytes: transformers' time on it is overhead per call more than arithmetic, and"
    " the ratio to it says little about larger models."
)


@app.command()
def main(
    engine: Annotated[
        list[str] | None,
        typer.Option(help=", ".join(_PEERS) + "; may be repeated. Specpress always runs.", show_default="all"),
    ] = None,
    draft_lengths: Annotated[
        str,
        # llama-cpp-python advises 2 on CPUs and has 10 by default; 5 is what OpenVINO's samples use.
        typer.Option(help="Drafted tokens a round, tried with every drafter, comma-separated."),
    ] = "2,5,10",
    prompts: Annotated[int, typer.Option(help="Number of prompts; 8: those of the report.", min=1)] = 8,
    source: Annotated[str, typer.Option(help="Their text: stdlib, a file, a directory, or a dataset.")] = "stdlib",
    seed: Annotated[int, typer.Option(help="Which prompts: the report takes 0, too.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of every way of decoding.", min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="Of every engine.", show_default="physical cores", min=1)] = None,
    peer_python: Annotated[Path, typer.Option(help="The peers' environment.")] = Path(".peers/bin/python"),
    work: Annotated[Path, typer.Option(help="Where the pair is kept in the peers' formats.")] = Path("runs/compare"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Decodes the pair with Specpress, transformers, OpenVINO GenAI and llama-cpp-python, with and without drafts."""
    with without_traceback(USER_ERRORS):
        ways = _ways(engine, draft_lengths)
        pythons = interpreters(peer_python, "peers", any(way.peer for way in ways))
        writable("--json", json_file)

        # Imported here: torch takes longer to load than `--help` may take.
        import standings
        from models import Workshop
        from pair import Formats, fingerprint, held_out_prompts, make_peer_formats, our_format, positions
        from rounds import Work, decode

        from compress.model.source import default_pair
        from runtime.bench.measure import machine
        from runtime.bench.output import console, write
        from runtime.native import default_threads

        out = console(120)
        count = threads or default_threads()
        pair = Formats(*default_pair())
        most = positions(pair)
        if new_tokens >= most:
            raise UserError(f"--new-tokens: expected fewer than the pair's {most} positions, found {new_tokens}")
        corpus, tokens = held_out_prompts(pair, source, prompts, seed, most - new_tokens)
        require_native_kernels()
        shop = Workshop(work.absolute() / f"pair-{fingerprint(pair)}", "pair", *pythons, count, say)
        formats = make_peer_formats(shop, pair, ways)
        asked = Work(tokens, new_tokens, rounds, count)
        out.print(
            f"the embedded pair; {machine()['cpu']}, {count} threads; greedy, {new_tokens} tokens after each of"
            f" {len(tokens)} prompts ({corpus}); token ids in to token ids out, the prompt's time included;"
            f" {rounds} interleaved rounds\n{NOTE}",
            soft_wrap=True,
        )
        say("compressing the pair's target to int8")
        with our_format(shop, pair) as ours:
            starts = _starts(ways, formats | {OURS: ours}, pythons, shop.folder, most)
            found = decode(starts, asked, say)
        standings.print_ways(out, found, standings.rows(found, asked))
        standings.print_ratios(out, standings.ratios(found))
        if json_file is not None:
            content = {"pair": shop.folder.name, "machine": machine(), "note": NOTE}
            write(json_file, content | standings.report(found, asked, corpus))


def _ways(engines: list[str] | None, draft_lengths: str) -> list[Way]:
    """Each way once for every draft length. Raises UserError for an unknown engine or a length out of range."""
    for name in engines or ():
        if name not in _PEERS:
            raise UserError(f"--engine: expected one of {', '.join(_PEERS)}, found {name!r}")
    lengths = numbers("--draft-lengths", draft_lengths, _MAX_DRAFT_LENGTH)
    chosen = {OURS, *(engines or _PEERS)}
    return [one for way in WAYS if way.engine in chosen for one in with_lengths(way, lengths)]


def _starts(
    ways: list[Way], formats: dict[str, "Formats"], pythons: tuple[Path, Path], logs: Path, positions: int
) -> list[tuple["Start", list[Way]]]:
    """One worker for each engine and drafter, which serves all draft lengths. `pythons`: ours and the peers'."""
    from processes import Start

    grouped: dict[str, list[Way]] = {}
    for way in ways:
        grouped.setdefault(way.name, []).append(way)
    out = []
    for name, members in grouped.items():
        way, given = members[0], formats[members[0].engine]
        options = {"target": str(given.target), "draft": str(given.draft)}
        options |= {"drafter": way.drafter, "positions": str(positions)}
        log = logs / f"{name.replace(', ', '-')}.log"
        out.append((Start(name, way.worker, pythons[way.peer], options, log), members))
    return out


if __name__ == "__main__":
    app()
