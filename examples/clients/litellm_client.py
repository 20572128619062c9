"""LiteLLM against Pagoda, as any OpenAI-compatible server: prefix the model's name with `openai/`.

pip install litellm; python examples/clients/litellm_client.py --base-url http://127.0.0.1:8000/v1 --model pagoda-tiny
"""

import argparse
import asyncio
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of a price list at import

import litellm


async def ask_at_once(common: dict[str, object], questions: list[str]) -> list[str]:
    """Answers to all questions, asked concurrently."""
    asked = (litellm.acompletion(messages=[{"role": "user", "content": text}], **common) for text in questions)
    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pagoda-tiny")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    common: dict[str, object] = {
        "model": f"openai/{args.model}",
        "api_base": args.base_url,
        "api_key": args.api_key,
        "temperature": 0,
        "max_tokens": 40,
        "num_retries": 0,
    }
    question = [{"role": "user", "content": "Tell me a short story."}]

    answer = litellm.completion(messages=question, **common)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.completion_tokens <= 40
    print(f"completion: {text!r}")

    stream = litellm.completion(messages=question, stream=True, **common)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == text
    print(f"streamed: {len(pieces)} pieces")

    answers = asyncio.run(ask_at_once(common, ["Tell me a short story.", "Hello!", "What can you do?"]))
    assert answers[0] == text
    assert all(answers)
    print(f"at once: {answers[1]!r}, {answers[2]!r}")

    # LiteLLM recognises a full context by the message of the error, and callers fall back to another model on it.
    try:
        litellm.completion(messages=[{"role": "user", "content": "long " * 100_000}], **common)
    except litellm.ContextWindowExceededError as error:
        print(f"refused: {str(error)[:120]}")
    else:
        raise AssertionError("a prompt beyond the context was accepted")


if __name__ == "__main__":
    main()
