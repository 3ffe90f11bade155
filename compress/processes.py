"""Runs as processes of their own: started, listened to, ended with this one; and several at once."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ended:
    """How a run's process ended: its exit code (negative: the signal that ended it) and its last line of error."""

    code: int
    error: str


Say = Callable[[str], None]
# (command, file for everything that it prints, where its lines of progress go) → how it ended.
Launch = Callable[[Sequence[str], Path, Say], Ended]


def launch(command: Sequence[str], log: Path, say: Say) -> Ended:
    """Runs a command to its end; all that it prints goes to `log`, its progress to `say` as well."""
    last = ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:
                file.write(line)
                file.flush()
                say(line.rstrip())
                last = line.strip() or last
            return Ended(process.wait(), last)
        except BaseException:
            # Ctrl-C reaches the run too, which then puts its folder in order.
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise


def all_of(work: Sequence[tuple[str, Callable[[], Result]]], at_once: int) -> Iterator[tuple[str, Result]]:
    """The results of the work by name, as they come; so many at a time. Raises what one of them raises."""
    if at_once == 1:  # in this thread, which Ctrl-C reaches
        yield from ((name, one()) for name, one in work)
        return
    from concurrent.futures import ThreadPoolExecutor, as_completed

    pool = ThreadPoolExecutor(at_once, "run")
    try:
        futures = {pool.submit(one): name for name, one in work}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # those that run end with the connection to the cluster
        raise
    pool.shutdown()
