"""The openai package against a server; BASE_URL says where it is."""

import os

from openai import OpenAI


def main() -> None:
    client = OpenAI(api_key="EMPTY", base_url=os.environ["BASE_URL"])
    model = client.models.list().data[0].id
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who are you?"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16)
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=16, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    completion = client.completions.create(model=model, prompt="A robot may not", n=2, max_tokens=6, logprobs=3)
    print(repr(answer.choices[0].message.content), len(pieces), len(completion.choices))


if __name__ == "__main__":
    main()
