"""instructor against Pagoda in its default TOOLS mode: answers as pydantic objects, by way of a named tool.

pip install instructor; python examples/clients/instructor_client.py --base-url http://127.0.0.1:8000/v1

A named tool's arguments are guaranteed to match its schema, so no retry is needed even with a tiny model. What the
values say is the model's own.
"""

import argparse

import instructor
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
    client = instructor.from_openai(
        openai.OpenAI(base_url=args.base_url, api_key=args.api_key, timeout=120, max_retries=0)
    )
    for text in ("Anna is 7 years old.", "Tom is a boy. He is 9 years old."):
        person = client.chat.completions.create(
            model=args.model,
            response_model=Person,
            messages=[{"role": "user", "content": f"Who is this about, and how old? {text}"}],
            temperature=0,
            max_tokens=100,
            max_retries=0,
        )
        assert isinstance(person, Person)
        print(f"{text} -> {person!r}")

    # Streamed: each partial object holds what has arrived so far.
    partial = None
    for partial in client.chat.completions.create_partial(
        model=args.model,
        response_model=Person,
        messages=[{"role": "user", "content": "Who is this about, and how old? Anna is 7 years old."}],
        temperature=0,
        max_tokens=100,
    ):
        assert partial is not None
    assert partial is not None
    Person.model_validate(partial.model_dump())
    print(f"streamed: {partial!r}")


if __name__ == "__main__":
    main()
