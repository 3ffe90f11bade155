"""What is stopped or killed while it works: processes that hear Ctrl-C, and programs that kill work of their own and go
on with it (kill_driver.py), run beside the tests."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def hear_interrupts() -> None:
    """In a new process: it ends by Ctrl-C. A shell's background jobs ignore it, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def drive(driver: str, job: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """What a driver, a path below the tests, found of a job, which is written for it; `errors` is what it said."""
    job.write_text(json.dumps(wanted))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / driver), str(job)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout) | {"errors": done.stderr}
    return found
