"""The embedded pair, decoded speculatively by Specpress and by its peers, interleaved.

    make peers
    .venv/bin/python examples/compare/speculation.py

Greedy, the same held-out prompts for all. Each engine has processes of its own; only one computes at any moment.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ways import ENGINES, OURS, WAYS, Way, with_lengths

from compress.errors import USER_ERRORS
from runtime.bench.options import writable
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
        if any(way.peer for way in ways) and not peer_python.is_file():
            raise UserError(f"--peer-python: there is no {peer_python}; `make peers` builds the peers' environment")
        writable("--json", json_file)
        _run(ways, (source, prompts, seed), new_tokens, rounds, threads, peer_python, work, json_file)


def _ways(engines: list[str] | None, draft_lengths: str) -> list[Way]:
    """Each way once for every draft length. Raises UserError for an unknown engine or a length out of range."""
    for name in engines or ():
        if name not in _PEERS:
            raise UserError(f"--engine: expected one of {', '.join(_PEERS)}, found {name!r}")
    parts = [part.strip() for part in draft_lengths.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MAX_DRAFT_LENGTH for part in parts):
        raise UserError(
            f"--draft-lengths: expected numbers from 1 to {_MAX_DRAFT_LENGTH} with commas between them,"
            f" found {draft_lengths!r}"
        )
    lengths = list(dict.fromkeys(int(part) for part in parts))
    chosen = {OURS, *(engines or _PEERS)}
    return [one for way in WAYS if way.engine in chosen for one in with_lengths(way, lengths)]


def _run(
    ways: list[Way],
    wanted: tuple[str, int, int],
    new_tokens: int,
    rounds: int,
    threads: int | None,
    peer_python: Path,
    work: Path,
    json_file: Path | None,
) -> None:
    # Imported here: torch takes longer to load than `--help` may take.
    import standings
    from models import Workshop
    from pair import Formats, fingerprint, held_out_prompts, make_peer_formats, our_format, positions
    from rich.console import Console
    from rounds import Work, decode

    from compress.model.source import default_pair
    from runtime.bench.measure import machine
    from runtime.bench.output import write
    from runtime.native import PATHS, default_threads, usable

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    notes = Console(highlight=False, stderr=True)
    count = threads or default_threads()
    pair = Formats(*default_pair())
    most = positions(pair)
    if new_tokens >= most:
        raise UserError(f"--new-tokens: expected fewer than the pair's {most} positions, found {new_tokens}")
    corpus, tokens = held_out_prompts(pair, *wanted, room=most - new_tokens)
    if not any(usable(path)[0] for path in PATHS):
        raise UserError(f"the native kernels, which are to be compared, do not run here: {usable(PATHS[-1])[1]}")
    # absolute, not resolved: an environment's python is a link whose own place says which environment it is
    python, peer = Path(sys.executable).absolute(), peer_python.absolute()
    shop = Workshop(work.absolute() / f"pair-{fingerprint(pair)}", "pair", python, peer, count, notes.print)
    formats = make_peer_formats(shop, pair, ways)
    asked = Work(tokens, new_tokens, rounds, count)
    console.print(
        f"the embedded pair; {machine()['cpu']}, {count} threads; greedy, {new_tokens} tokens after each of"
        f" {len(tokens)} prompts ({corpus}); token ids in to token ids out, the prompt's time included;"
        f" {rounds} interleaved rounds\n{NOTE}",
        soft_wrap=True,
    )
    notes.print("compressing the pair's target to int8")
    with our_format(shop, pair) as ours:
        starts = _starts(ways, formats | {OURS: ours}, (python, peer), shop.folder, most)
        found = decode(starts, asked, notes.print)
    standings.print_ways(console, found, standings.rows(found, asked))
    standings.print_ratios(console, standings.ratios(found))
    if json_file is not None:
        content = {"pair": shop.folder.name, "machine": machine(), "note": NOTE}
        write(json_file, content | standings.report(found, asked, corpus))


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
        way = members[0]
        given = formats[way.engine]
        options = {
            "target": str(given.target),
            "draft": str(given.draft),
            "drafter": way.drafter,
            "positions": str(positions),
        }
        log = logs / f"{name.replace(', ', '-')}.log"
        out.append((Start(name, way.worker, pythons[way.peer], options, log), members))
    return out


if __name__ == "__main__":
    app()
