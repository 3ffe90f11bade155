"""The parts of a cluster that need none: routing, its file, and what is said without Ray."""

import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.errors import UserError
from runtime.serve.prefixes import PAGE, Kept, page_digests, ranked
from runtime.serve.ray_config import ClusterConfig


def test_pages_are_known_by_all_that_stands_before_them() -> None:
    generator = random.Random(1)
    tokens = [generator.randrange(50_000) for _ in range(5 * PAGE + 17)]
    pages = page_digests(tokens)
    assert len(pages) == 5 and pages == page_digests(tokens[: 5 * PAGE])
    other = page_digests([*tokens[: 2 * PAGE], tokens[2 * PAGE] + 1, *tokens[2 * PAGE + 1 :]])
    assert other[:2] == pages[:2] and not set(other[2:]) & set(pages[2:])
    assert not set(page_digests(tokens, "salt")) & set(pages)
    assert page_digests(tokens[: PAGE - 1]) == []


def test_a_replica_forgets_what_was_used_least_and_ends_of_texts_first() -> None:
    one, other = [bytes([i]) for i in range(6)], [bytes([100 + i]) for i in range(4)]
    kept = Kept(room=8)
    kept.use(one)
    kept.use(other)
    assert kept.known(other) == 4 and kept.known(one) == 4
    kept.learn([*one, *other])
    assert kept.known(other) == 4 and len(kept.pages) == 8
    assert Kept().known(one) == 0


def test_the_one_that_knows_most_is_preferred_within_the_bound_of_load() -> None:
    assert ranked([3, 5, 0], 5, [1, 1, 1], [0, 0, 0], 1.25)[0] == 1
    assert ranked([3, 5, 0], 5, [1, 4, 1], [0, 0, 0], 1.25)[:2] == [0, 2]
    assert ranked([0, 0, 0], 0, [2, 1, 1], [0, 9, 3], 1.25) == [2, 1, 0]
    assert ranked([9, 0], 9, [0, 0], [0, 0], 1.0)[0] == 0
    generator = random.Random(2)
    for _ in range(200):
        load = [generator.randrange(20) for _ in range(generator.randrange(1, 6))]
        known = [generator.randrange(9) for _ in load]
        best = ranked(known, 9, load, [generator.randrange(40) for _ in load], 1.25)[0]
        assert load[best] + 1 <= max(1.25 * (sum(load) + 1) / len(load) + 2, min(load) + 1)


def test_beginnings_that_nobody_holds_are_spread_evenly() -> None:
    """Who has read one more counts as if it wrote two texts more; where nothing is to be read, texts alone count."""
    assert ranked([0, 0], 16, [0, 1], [32, 16], 1.25) == [1, 0]
    assert ranked([0, 0], 16, [0, 3], [320, 16], 1.25) == [0, 1]
    assert ranked([0, 0], 0, [0, 1], [32, 16], 1.25) == [0, 1]
    assert ranked([16, 16], 16, [0, 1], [32, 16], 1.25) == [0, 1]
    # Four beginnings for two replicas, whatever these write when one comes: two for each.
    generator = random.Random(3)
    for _ in range(50):
        spent = [0, 0]
        for _ in range(4):
            best = ranked([0, 0], 16, [generator.randrange(2), generator.randrange(2)], spent, 1.25)[0]
            spent[best] += 16
        assert spent == [32, 32]


def test_a_cluster_s_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("target: /m\nname: a\npages: 9\nreplicas: {least: 2, most: 3, resources: {engine: 1}}\n")
    told = ClusterConfig.load(file)
    assert (told.model.path, told.model.pages, told.replicas.most, told.limits.max_queued) == ("/m", 9, 3, 256)
    assert ClusterConfig.of(told.model_dump(mode="json"), "again") == told
    for wrong, sentence in (
        ("targets: x", "targets: Extra inputs"),
        ("name: x", "target: Field required"),
        ("target: x\nreplicas: {least: 3, most: 2}", "most (2) must be at least least"),
        ("target: x\nport: 0", "port: Input should be greater"),
        ("target: x\nhost: 0.0.0.0", "can be reached from other machines"),
        ("- target", "expected keys and values"),
        ("target: [", "expected a YAML file"),
        ("1: x", "expected names as keys"),
    ):
        file.write_text(wrong)
        with pytest.raises(UserError) as caught:
            ClusterConfig.load(file)
        assert sentence in str(caught.value), str(caught.value)


def test_without_ray_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.sweep import app as sweep
    from runtime.serve.ray_command import app as cluster

    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("runtime.serve.ray_connection.find_spec", lambda name: None if name == "ray" else real(name))
    file = tmp_path / "cluster.yaml"
    file.write_text("target: x\n")
    words = ["--recipes", "int8-dynamic", "--out", str(tmp_path / "out"), "--ray", "auto"]
    for app, asked in ((cluster, ["up", str(file)]), (cluster, ["file", str(file)]), (sweep, words)):
        found = CliRunner().invoke(app, asked)
        assert found.exit_code == 2 and "pip install 'specpress[ray]'" in found.output, found.output
    assert "ray" not in sys.modules or real("ray") is not None
