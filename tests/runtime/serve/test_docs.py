"""Every curl line of docs/serve.md, run by curl against a server."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving import ROOT, Running

PAGE = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LINES = [line for block in BLOCKS for line in re.split(r"\n(?=curl)", block.strip()) if line.startswith("curl")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_curl_line_works(server: Running, pair: tuple[Path, Path]) -> None:
    assert len(LINES) >= 20
    for line in LINES:
        command = line.replace("http://127.0.0.1:8000", server.address).replace("TARGET", str(pair[1]))
        done = subprocess.run(
            ["sh", "-c", command.replace("curl ", "curl --fail-with-body -sS ", 1)], capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout, (line, done.stdout, done.stderr)
