"""lm-eval's `local-completions` and `local-chat-completions`, on a task of 200 questions that lies in a file."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = 200
WORDS = [
    "path",
    "name",
    "value",
    "index",
    "count",
    "start",
    "total",
    "first",
    "list",
    "key",
    "line",
    "text",
    "node",
    "item",
    "size",
    "self",
    "data",
    "file",
    "code",
    "test",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-choice task in lm-eval's YAML, with its questions beside it."""
    folder = tmp_path_factory.mktemp("task")
    generator = random.Random(0)
    with (folder / "questions.jsonl").open("w") as file:
        for _ in range(QUESTIONS):
            choices = generator.sample(WORDS, 4)
            question = f"def {generator.choice(WORDS)}({generator.choice(WORDS)}):\n    return"
            file.write(json.dumps({"question": question, "choices": choices, "answer": generator.randrange(4)}) + "\n")
    (folder / "local_choices.yaml").write_text(
        "task: local_choices\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'questions.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    return folder


def _evaluated(address: str, task: Path, concurrent: int) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    told = f"model=pair,base_url={address}/v1/completions,num_concurrent={concurrent},tokenizer_backend=remote"
    return simple_evaluate(
        model="local-completions",
        model_args=told + ",max_length=1024",
        tasks=["local_choices"],
        task_manager=TaskManager(include_path=str(task)),
        log_samples=True,
        bootstrap_iters=0,
    )


def _loglikelihoods(found: Any) -> list[Any]:
    samples = sorted(found["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    return [[tuple(answer) for answer in sample["filtered_resps"]] for sample in samples]


def test_local_completions_at_any_load_gives_the_same_digits(address: str, task: Path) -> None:
    cold = _evaluated(address, task, 1)
    warm = _evaluated(address, task, 16)
    assert _loglikelihoods(cold) == _loglikelihoods(warm)
    assert len(_loglikelihoods(cold)) == QUESTIONS
    assert 0 <= cold["results"]["local_choices"]["acc,none"] <= 1
    assert len({answer for question in _loglikelihoods(cold) for answer in question}) > 300


def test_they_are_those_of_one_request_after_the_other(address: str, task: Path) -> None:
    """A plain client without speculation, summed as lm-eval does."""
    import requests

    found = _loglikelihoods(_evaluated(address, task, 16))
    questions = [json.loads(line) for line in (task / "questions.jsonl").read_text().splitlines()]

    def tokens(text: str) -> list[int]:
        return requests.post(f"{address}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    def score(question: dict[str, Any], choice: str) -> float:
        context, whole = tokens(question["question"]), tokens(f"{question['question']} {choice}")
        asked = {"prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        asked["specpress"] = {"drafter": "none"}
        choice_ = requests.post(f"{address}/v1/completions", json=asked).json()["choices"][0]
        return sum(choice_["logprobs"]["token_logprobs"][len(context) : -1])

    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda q: [score(q, choice) for choice in q["choices"]], questions[:40]))
    assert [[answer[0] for answer in question] for question in found[:40]] == expected


def test_local_chat_completions(address: str, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with (tmp_path / "texts.jsonl").open("w") as file:
        for word in WORDS[:8]:
            file.write(json.dumps({"question": f"Write {word}", "answer": word}) + "\n")
    (tmp_path / "local_texts.yaml").write_text(
        "task: local_texts\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'texts.jsonl'}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  max_gen_toks: 8\n  until: ['\\n\\n']\n  temperature: 0\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    found = simple_evaluate(
        model="local-chat-completions",
        model_args=f"model=pair,base_url={address}/v1/chat/completions,num_concurrent=4,tokenizer_backend=none",
        tasks=["local_texts"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert len(found["samples"]["local_texts"]) == 8
