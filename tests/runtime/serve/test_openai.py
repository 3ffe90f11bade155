"""The installed `openai` client against the server; its texts are those of a `Speculator` alone."""

from typing import Any

import openai
import pytest

from runtime.sampling.params import Sampling
from tests.serving import TEMPLATE, Running

PROMPTS = ["def f(x):\n", "import os\n\n\nclass Reader", "The answer is", "for line in"]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def test_completions_are_the_texts_of_a_speculator(client: openai.OpenAI, alone: Any) -> None:
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)):
        extra = {"top_k": sampling.top_k}
        answer = client.completions.create(
            model="pair", prompt=PROMPTS, max_tokens=24, temperature=sampling.temperature, top_p=sampling.top_p,
            seed=sampling.seed, extra_body=extra,
        )  # fmt: skip
        expected = alone.generate(PROMPTS, 24, sampling)
        assert [choice.text for choice in answer.choices] == [one.text for one in expected]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.finish_reason for choice in answer.choices] == [one.finish for one in expected]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected)
        assert answer.usage.prompt_tokens == sum(len(one.prompt_tokens) for one in expected)
        assert str(answer.system_fingerprint).startswith("fp_")


def test_a_stream_is_the_same_text(client: openai.OpenAI, alone: Any) -> None:
    stream = client.completions.create(
        model="pair", prompt=PROMPTS[1], max_tokens=40, temperature=0.7, seed=9, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    expected = alone.generate([PROMPTS[1]], 40, Sampling(temperature=0.7, seed=9))[0]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert len(chunks) > 4 and chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [expected.finish]


def test_a_drawn_seed_is_told_and_gives_the_same_text_again(client: openai.OpenAI) -> None:
    first = client.completions.create(model="pair", prompt=PROMPTS[0], max_tokens=16, temperature=1)
    seed = first.model_dump()["specpress"]["seed"]
    again = client.completions.create(model="pair", prompt=PROMPTS[0], max_tokens=16, temperature=1, seed=seed)
    other = client.completions.create(model="pair", prompt=PROMPTS[0], max_tokens=16, temperature=1, seed=seed + 1)
    assert again.choices[0].text == first.choices[0].text != other.choices[0].text


def test_choices_are_the_texts_of_seeds_in_a_row(client: openai.OpenAI, alone: Any) -> None:
    answer = client.completions.create(model="pair", prompt=PROMPTS[:2], max_tokens=12, temperature=1, seed=3, n=3)
    expected = [
        alone.generate([prompt], 12, Sampling(temperature=1, seed=3 + i))[0].text
        for prompt in PROMPTS[:2]
        for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == expected


def test_a_chat_is_the_templates_text_continued(client: openai.OpenAI, alone: Any) -> None:
    import jinja2

    messages: Any = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": [{"type": "text", "text": "1 2 3"}]},
    ]
    prompt = jinja2.Template(TEMPLATE, keep_trailing_newline=True).render(
        messages=[{"role": "system", "content": "You count."}, {"role": "user", "content": "1 2 3"}],
        add_generation_prompt=True,
    )
    tokens = alone.target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    expected = alone.generate([tokens], 20, Sampling(temperature=0.5, seed=1))[0].text
    asked = {"model": "pair", "messages": messages, "max_completion_tokens": 20, "temperature": 0.5, "seed": 1}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    content = answer.choices[0].logprobs.content
    assert answer.usage is not None and len(content) == answer.usage.completion_tokens
    assert all(one.token in [top.token for top in one.top_logprobs] for one in content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_responses_stream_typed_events(client: openai.OpenAI) -> None:
    asked: Any = {"model": "pair", "input": "Say something", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.output_text
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_clients_errors_are_the_right_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="exceed the context") as caught:
        client.completions.create(model="pair", prompt="a", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"
    assert client.models.list().data[0].id == "pair"
    assert client.models.retrieve("pair").owned_by == "specpress"
