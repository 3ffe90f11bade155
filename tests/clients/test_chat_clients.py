"""`openai` and `langchain-openai` as they are installed."""

from openai import OpenAI


def test_openai(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    assert client.models.list().data[0].id == "pair"
    messages = [{"role": "user", "content": "Hello"}]
    asked = {"model": "pair", "messages": messages, "max_completion_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**asked)
    parts = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(parts)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    answer = client.responses.create(model="pair", input="Hello", max_output_tokens=8)
    assert answer.output_text


def test_langchain(address: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="pair", temperature=0, max_tokens=12)
    whole = chat.invoke([("system", "Be brief."), ("human", "Hello")])
    assert whole.content and whole.usage_metadata["output_tokens"] == 12
    parts = list(chat.stream([("system", "Be brief."), ("human", "Hello")]))
    assert "".join(part.content for part in parts) == whole.content
    model = OpenAI(base_url=f"{address}/v1", api_key="none", model="pair", temperature=0, max_tokens=8)
    assert model.invoke("def f(")
    assert model.batch(["a =", "b ="]) == [model.invoke("a ="), model.invoke("b =")]
