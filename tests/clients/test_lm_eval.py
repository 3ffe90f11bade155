"""lm-eval's `local-completions` and `local-chat-completions`, on a task of 200 questions that lies in a file."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = 200
WORDS = (
    *("path", "name", "value", "index", "count", "start", "total", "first", "list", "key", "line", "text", "node"),
    *("item", "size", "self", "data", "file", "code", "test"),
)
ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples/pair"
EXAMPLES = "".join(f"def {name}(self):\n    return self.{name}\n\n" for name in WORDS[:10])
# What scores the answers in a process of its own, with the project's environment: no server, one text after the other.
SCORES = """
import json, sys
from runtime import Speculator, load

speculator = Speculator(load(sys.argv[1]))
read = lambda text: speculator.target.tokenizer(text, add_special_tokens=False)["input_ids"]
scores = []
for line in open(sys.argv[2]):
    question = json.loads(line)
    context = len(read(question["question"]))
    for choice in question["choices"]:
        tokens = read(f"{question['question']} {choice}")
        found = speculator.generate([tokens], 1, prompt_logprobs=1)[0].prompt_logprobs[context:]
        scores.append([sum(one.logprob for one in found), all(one.rank == 1 for one in found)])
print(json.dumps(scores))
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-choice task in lm-eval's YAML, with its questions beside it."""
    folder = tmp_path_factory.mktemp("task")
    generator = random.Random(0)
    with (folder / "questions.jsonl").open("w") as file:
        for _ in range(QUESTIONS):
            choices = generator.sample(WORDS, 4)
            # What stands before all questions fills a page of the cache.
            question = EXAMPLES + f"def {generator.choice(WORDS)}({generator.choice(WORDS)}):\n    return"
            file.write(json.dumps({"question": question, "choices": choices, "answer": generator.randrange(4)}) + "\n")
    (folder / "local_choices.yaml").write_text(
        "task: local_choices\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'questions.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    return folder


def _evaluated(address: str, task: Path, concurrent: int, questions: int = QUESTIONS, tokenizer: str = "") -> Any:
    """By the server's own tokenizer, or one that lm-eval loads from a path."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    told = f"model=pair,base_url={address}/v1/completions,num_concurrent={concurrent}"
    told += f",tokenizer_backend=huggingface,tokenizer={tokenizer}" if tokenizer else ",tokenizer_backend=remote"
    return simple_evaluate(
        model="local-completions",
        model_args=told + ",max_length=1024",
        tasks=["local_choices"],
        task_manager=TaskManager(include_path=str(task)),
        log_samples=True,
        bootstrap_iters=0,
        limit=questions,
    )


def _loglikelihoods(found: Any) -> list[Any]:
    samples = sorted(found["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    return [[tuple(answer) for answer in sample["filtered_resps"]] for sample in samples]


def test_loglikelihoods_over_http_are_those_of_the_engine_alone(address: str, plain_address: str, task: Path) -> None:
    """With speculation and without, sixteen at a time and one by one, before and after the cache has their pages."""
    command = [ROOT / ".venv/bin/python", "-c", SCORES, PAIR / "target", task / "questions.jsonl"]
    alone = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout)
    expected = [[tuple(score) for score in alone[4 * i : 4 * i + 4]] for i in range(QUESTIONS)]
    assert len(alone) == 4 * QUESTIONS and len({score for score, _ in alone}) > 300
    runs = ((address, 16), (address, 16), (address, 1), (plain_address, 16), (plain_address, 16))
    for place, (server, concurrent) in enumerate(runs):
        found = _evaluated(server, task, concurrent, tokenizer=str(PAIR / "target"))
        assert 0 <= found["results"]["local_choices"]["acc,none"] <= 1
        differ = [pair for pair in zip(_loglikelihoods(found), expected, strict=True) if pair[0] != pair[1]]
        assert not differ, (place, len(differ), differ[:2])
    # The server's own tokenizer is asked for every question and answer by itself: that takes its time.
    few = _loglikelihoods(_evaluated(address, task, 16, 20))
    assert few == expected[:20]


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
