"""The page's own endpoints on a real server, and what it compares."""

import re
from pathlib import Path

import numpy as np
import pytest

from runtime.serve.compare import kl_rows
from tests.serving import Running

PAGE = Path(__file__).parents[3] / "runtime" / "serve" / "page"


def test_the_page_is_small_and_of_this_host_alone(server: Running) -> None:
    files = {path.name: path.read_bytes() for path in PAGE.iterdir()}
    assert sum(map(len, files.values())) < 150_000
    answer = server.ask("GET", "/")
    assert answer.body == files["index.html"]
    for name, content in files.items():
        found = server.ask("GET", f"/page/{name}")
        assert (found.status, found.body) == (200, content)
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        # Addresses in the files: the namespaces of SVG and nothing else.
        assert set(re.findall(rb"https?://[^\"' ]+", content)) <= {b"http://www.w3.org/2000/svg"}
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", content)
    assert server.ask("GET", "/page/none.js").status == 404


def test_the_page_is_told_what_may_be_chosen(server: Running) -> None:
    found = server.ask("GET", "/page-data").json()
    assert found["original"] is None and found["runs"] is True
    assert found["models"][0]["name"] == "pair" and "lookup" in found["models"][0]["drafters"]
    assert found["models"][0]["chat"] is True
    answer = server.ask("POST", "/compare", {"text": "a b"})
    assert answer.status == 404 and "--original PATH" in answer.json()["error"]["message"]


def test_kl_of_rows_is_what_its_definition_says() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(2, 9, 40)) * 3
    logits[0, :, 3] = -np.inf
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in logits)
    kept = [i for i in range(40) if i != 3]
    expected = [(np.exp(p[kept]) * (p - q)[kept]).sum() for p, q in zip(log_p, log_q, strict=True)]
    assert kl_rows(log_p, log_q) == pytest.approx(expected, rel=1e-12)
    assert (kl_rows(log_q, log_q) == 0).all()
