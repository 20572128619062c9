"""The official `anthropic` package against Pagoda's /v1/messages: a message, a stream, the count of tokens, an error.

pip install anthropic; python examples/clients/anthropic_client.py --base-url http://127.0.0.1:8000/v1
"""

import argparse

import anthropic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pagoda-tiny")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    # This client adds /v1 itself.
    root = args.base_url.rstrip("/").removesuffix("/v1")
    client = anthropic.Anthropic(base_url=root, api_key=args.api_key, timeout=120, max_retries=0)
    question: anthropic.types.MessageParam = {"role": "user", "content": "Tell me a short story."}

    # The most tokens of the answer are required in this API. What its own clients pass on untyped goes into extra_body.
    greedy = {"model": args.model, "max_tokens": 40, "messages": [question], "extra_body": {"temperature": 0}}
    message = client.messages.create(**greedy)
    assert message.role == "assistant"
    assert message.stop_reason in ("max_tokens", "end_turn")
    text = "".join(block.text for block in message.content if block.type == "text")
    assert text
    assert message.usage.output_tokens <= 40
    print(f"message: {text!r}")

    with client.messages.stream(**greedy) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert "".join(pieces) == text
    assert whole.usage.output_tokens == message.usage.output_tokens
    print(f"streamed: {len(pieces)} pieces")

    counted = client.messages.count_tokens(model=args.model, messages=[question])
    cached = message.usage.cache_read_input_tokens or 0  # counted apart in this API
    assert counted.input_tokens == message.usage.input_tokens + cached
    print(f"counted: {counted.input_tokens} tokens")

    try:
        client.messages.create(**{**greedy, "max_tokens": 0})
    except anthropic.BadRequestError as error:
        print(f"refused: {error.message}")
    else:
        raise AssertionError("max_tokens 0 was accepted")


if __name__ == "__main__":
    main()
