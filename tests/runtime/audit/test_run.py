"""The checks one by one: greedy differences, log-probabilities, bounds, verdicts, callables, and the command."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.audit import greedy
from runtime.audit.asks import Ask, Budget, CallableEngine, import_engine
from runtime.audit.output import page, rows
from runtime.audit.report import LogprobsEntry, SamplingRow, judge
from runtime.audit.run import Plan, audit, known_prompts
from runtime.audit.sampled import Known
from runtime.audit.statistics import accusations, chi_squared_tail, needed
from runtime.errors import UserError
from tests import warm
from tests.runtime.audit.engines import Sampler

ROOT = Path(__file__).parents[3]
engine: Sampler | None = None


def patient(asks: Sequence[Ask]) -> list[Any]:
    """What the command imports: a sound sampler of the folder that FOLDER names."""
    from runtime.audit.known import read

    global engine
    engine = engine or Sampler(Known(*read(Path(FOLDER))))
    return list(engine(asks))


FOLDER = ""


class InBatches(Sampler):
    """The last token of a greedy text is another one where several are decoded together, with drafts only."""

    def __call__(self, asks: Sequence[Ask]) -> list[Any]:
        found = [dict(one) for one in super().__call__(asks)]
        for ask, one in zip(asks, found, strict=True):
            if len(asks) > 1 and ask.drafts and not ask.temperature:
                wrong = self.known.target.letters[0]
                one["tokens"][-1] = self.known.target.letters[1] if one["tokens"][-1] == wrong else wrong
        return found


def test_greedy_texts_that_differ_in_batches_are_shown(known: Known) -> None:
    asked = known_prompts(known, 7)[:5]
    sound = greedy.check(CallableEngine("s", Sampler(known)), asked, Budget(999, 60), 1, known.target)
    assert [way.equal == way.texts for way in sound.ways] == [True, True, True]
    found = greedy.check(CallableEngine("b", InBatches(known)), asked, Budget(999, 60), 2, known.target)
    ways = {way.name: way for way in found.ways}
    assert [ways[name].equal for name in ("with drafts, alone", "without drafts, together")] == [10, 10]
    wrong = ways["with drafts, together"]
    assert wrong.equal == 0 and wrong.texts == 10 and wrong.first is not None
    assert (wrong.first.prompt, wrong.first.place) == (0, 6) and wrong.first.gap is not None and wrong.first.gap > 0


def test_texts_of_other_models_are_compared_as_texts() -> None:
    def answers(asks: Sequence[Ask]) -> list[Any]:
        return [{"text": ask.text.upper() + ("!" if ask.drafts and ask.text == "two" else "")} for ask in asks]

    asked = tuple(Ask((), text, 8) for text in ("one", "two"))
    found = audit(CallableEngine("texts", answers), None, Plan(prompts=asked))
    assert found.verdict == "differs" and "prompt 2 after 3 tokens: the end expected, '!' found" in found.sentence
    assert any("--known" in line for line in found.skipped)


def test_wrong_logprobs_are_told(known: Known) -> None:
    class Shifted(Sampler):
        def logprobs(self, prompt: Any, text: Any) -> list[float]:
            return [one + 0.1 * self.drafts for one in super().logprobs(prompt, text)]

    plan = Plan(requests=120, new_tokens=8, greedy_tokens=4, repeats=1)
    found = audit(CallableEngine("shifted", Shifted(known)), known, plan)
    assert found.verdict == "differs" and "with drafts are off by up to 0.1 nats" in found.sentence


def test_the_verdict_says_what_is_missing() -> None:
    row = SamplingRow(
        setting="temperature 1", drafts=True, requests=10, tokens=240, tokens_needed=1000, tests=5, accused=[]
    )
    assert judge([], [row], [], 0.05, 24, []) == ("cannot tell", "needs 32 more requests")
    enough = row.model_copy(update={"tokens": 1000})
    assert judge([], [enough], [], 0.05, 24, [])[0] == "lossless"
    error = LogprobsEntry(drafts=False, tokens=5, largest=0.2, mean=0.1)
    assert judge([], [enough], [error], 0.05, 24, [])[0] == "differs"


def test_corrections_for_many_tests() -> None:
    from scipy import stats

    for statistic, degrees in ((3.2, 1), (25.1, 19), (120.0, 56)):
        assert chi_squared_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9)
    many = {f"test {number}": 0.3 for number in range(100)}
    assert not accusations(many | {"a": 4e-4}, many | {"a": 1e-9}, ["broad"])
    assert [one.test for one in accusations(many | {"a": 1e-5}, many | {"a": 1e-9}, [])] == ["a"]
    # What the other half does not confirm.
    assert not accusations(many | {"a": 1e-5}, many | {"a": 0.5}, [])
    # The power that `needed` promises, by the noncentral law.
    tokens, alpha = needed(0.05, 20, 12), 0.025 / 12
    power = stats.ncx2.sf(stats.chi2.isf(alpha, 20), 20, tokens / 2 * 4 * 0.05**2)
    assert 0.87 < power < 0.93


@pytest.mark.parametrize(
    ("said", "sentence"),
    [("nowhere.module:engine", "No module named"), ("json:nothing", "no such function"), ("json", "no such function")],
)
def test_callables_that_are_not_there(said: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        import_engine(said)


@pytest.mark.parametrize("answers", [None, [], [3], [{"logprobs": []}], [{"tokens": [1], "logprobs": [float("nan")]}]])
def test_answers_that_are_none_are_told(answers: Any) -> None:
    with pytest.raises(UserError, match="wrong"):
        CallableEngine("wrong", lambda asks: answers).ask([Ask((1,), "a", 4)], together=True)


def test_the_page_escapes_what_engines_are_called(known: Known) -> None:
    plan = Plan(requests=30, greedy_tokens=3, repeats=1)
    found = audit(CallableEngine("<script>", Sampler(known)), known, plan)
    assert "<script>" not in page(found) and "&lt;script&gt;" in page(found)
    assert len(list(rows(found))) == page(found).count("<tr>") - 1


def command(*words: object) -> "subprocess.CompletedProcess[str]":
    return warm.run("runtime.audit", *words, cwd=ROOT)


def test_the_command_writes_its_model_and_audits(tmp_path: Path) -> None:
    assert command("model", tmp_path / "known", "--seed", 3).returncode == 0
    (tmp_path / "patient.py").write_text(
        f"import tests.runtime.audit.test_run as own\nown.FOLDER = {str(tmp_path / 'known')!r}\nengine = own.patient\n"
    )
    words = ["--callable", "tests.runtime.audit.test_run:patient", "--requests", 40, "--greedy-tokens", 3]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); import patient;"
         " from runtime.audit.__main__ import app; app()", str(tmp_path), "engine", *map(str, words),
         "--known", str(tmp_path / "known"), "--json", str(tmp_path / "a.json"), "--page", str(tmp_path / "a.html")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("cannot tell: "), done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["verdict"] == "cannot tell"
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["engine", "--known", "x"], "name one engine"),
        (["engine", "--url", "http://127.0.0.1:9/v1"], "--known FOLDER"),
        (["engine", "--url", "http://127.0.0.1:9/v1", "--known", "nowhere"], "audit.json"),
        (["engine", "--callable", "json:dumps", "--known", ".", "--top-k", "3"], "audit.json"),
        (["certificate", "nowhere"], "report.json"),
        (["--certificate", "nowhere"], "report.json"),
        (["--certificate", "nowhere", "engine"], "leave engine out"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str) -> None:
    done = command(*words)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
