"""What a run shows while it works: one line per stage, with the time that is left."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

# (stage, done, total), as everywhere in a run.
Progress = Callable[[str, int, int], None]
# A line for people.
Note = Callable[[str], None]

_TITLES = {
    "check": "Checking",
    "scan": "Looking at blocks",
    "gradients": "Taking gradients",
    "sensitivity": "Looking at layers",
    "products": "Timing products",
    "forwards": "Timing forwards",
    "caches": "Trying cache kinds",
    "acceptance": "Trying drafts",
    "quantize": "Working on weights",
    "tokenize": "Reading the text",
    "train": "Training",
    "heal": "Healing",
    "learn": "Training scales and codes",
    "ternary": "Training ternary weights",
    "qat": "Training quantised weights",
    "draft": "Training the draft",
    "states": "Writing text to learn from",
    "medusa": "Training Medusa heads",
    "block_draft": "Training the block drafter",
    "teacher": "Keeping the teacher's answers",
    "samples": "Sampling texts",
    "cache": "Calibrating the cache",
    "write": "Writing the model",
    "load": "Reading it back",
    "quality": "Measuring quality",
    "choices": "Choosing next lines",
    "long": "Reading long contexts",
    "tasks": "Running tasks",
    "trial": "Trying drafters",
    "speed": "Measuring speed",
    "baselines": "Timing transformers",
    "exports": "Measuring exports",
    "page": "Writing the report",
}
_EVERY = 5.0  # seconds between plain lines of one stage
# Seconds that rich takes the speed of bars from: blocks of large models take minutes each.
_PERIOD = 600.0


def silent(stage: str, done: int, total: int) -> None:
    """Progress for those who do not want to see any."""


def unsaid(line: str) -> None:
    """Notes for those who do not want to read any."""


def title_of(stage: str) -> str:
    """What a stage is called on the screen."""
    return f"Exporting {stage.removeprefix('export ')}" if stage.startswith("export ") else _TITLES.get(stage, stage)


class Lines:
    """Plain lines for logs: a stage's begin and end, and every few seconds in between."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._stage = ""
        self._begun = self._shown = 0.0
        self._ended = True
        self._reached: dict[int, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        title = title_of(stage)
        if stage != self._stage or (self._ended and done < total):
            self._stage, self._begun, self._shown, self._ended = stage, now, now, False
            self._reached = {done: now}
            if done < total:
                self.note(f"{title} …")
                return
        if done >= total:
            if not self._ended:
                self.note(f"{title}: done in {now - self._begun:.0f} s")
            self._ended = True
        elif now - self._shown >= _EVERY:
            self.note(f"{title}: {done} of {total}" + self._left(now, done, total))
            self._shown = now
        self._reached.setdefault(done, now)

    def _left(self, now: float, done: int, total: int) -> str:
        """By the later half of the steps so far: embeddings come first in a model, and take no time beside blocks."""
        first = min(self._reached, default=done)
        early = max((step for step in self._reached if 2 * (step - first) <= done - first), default=done)
        if early >= done:
            return ""
        seconds = (now - self._reached[early]) / (done - early) * (total - done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 120 else f", about {seconds:.0f} s left"

    def note(self, line: str) -> None:
        """A line that stays."""
        print(line, file=self._stream, flush=True)


class Bars:
    """The same on a terminal, as rich's bars."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self.bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            console=Console(stderr=True),
            speed_estimate_period=_PERIOD,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            # What a run that goes on finds done has taken no time here.
            self._tasks[stage] = self.bars.add_task(title_of(stage), total=total, completed=done)
        self.bars.update(self._tasks[stage], completed=done, total=total)

    def note(self, line: str) -> None:
        self.bars.console.print(line, markup=False, highlight=False)


@contextmanager
def show(stream: TextIO | None = None) -> Iterator[Lines | Bars]:
    """Bars where standard error is a terminal, else lines on `stream` (default: standard error)."""
    if stream is not None or not sys.stderr.isatty():
        yield Lines(stream or sys.stderr)
        return
    bars = Bars()
    with bars.bars:
        yield bars
