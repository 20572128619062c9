"""The official `openai` package against Pagoda: chat, streams, structured output, completions, errors.

pip install openai; python examples/clients/openai_client.py --base-url http://127.0.0.1:8000/v1 --model pagoda-tiny
"""

import argparse

import openai
from pydantic import BaseModel


class Person(BaseModel):
    """A person of whom a text speaks."""

    name: str
    age: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pagoda-tiny")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, timeout=120, max_retries=0)

    names = [model.id for model in client.models.list()]
    assert args.model in names, names

    question: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me a short story."}
    answer = client.chat.completions.create(model=args.model, messages=[question], temperature=0, max_tokens=40)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    print(f"chat: {text!r}")

    # The same question streamed gives the same text, piece by piece, and the usage at the end.
    stream = client.chat.completions.create(
        model=args.model,
        messages=[question],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    usage = chunks[-1].usage
    assert usage is not None
    # The prompt is cached by now, so details of the usage may differ.
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    print(f"streamed: {len(pieces)} pieces")

    # The schema of a pydantic model is kept to whatever the model would rather say.
    parsed = client.chat.completions.parse(
        model=args.model,
        messages=[{"role": "user", "content": "Who is this about, and how old? Anna is 7 years old."}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    print(f"parsed: {parsed.choices[0].message.parsed!r}")

    # vLLM's parameters beyond OpenAI's go into extra_body.
    completion = client.completions.create(
        model=args.model, prompt="Once upon a time", max_tokens=8, logprobs=2, n=2, seed=7, extra_body={"top_k": 40}
    )
    assert len(completion.choices) == 2
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        print(f"completion {choice.index}: {choice.text!r}")

    # Errors are typed, and name the field that is wrong.
    refusal = None
    try:
        client.completions.create(model=args.model, prompt="x", temperature=9)
    except openai.BadRequestError as error:
        refusal = error
    assert refusal is not None, "temperature 9 was accepted"
    assert refusal.param == "temperature", refusal.body
    print(f"refused: {refusal.message}")


if __name__ == "__main__":
    main()
