"""One conversation, then several at once."""

from vllm import LLM, SamplingParams

QUESTIONS = ["Who are you?", "Tell me about a cat.", "What is a river?"]


def conversation(question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": question},
    ]


def main() -> None:
    llm = LLM(model="pagoda-tiny", enforce_eager=True)
    params = SamplingParams(temperature=0.5, max_tokens=12, stop=["\n\n"])
    assert params.stop == ["\n\n"]
    (alone,) = llm.chat(conversation(QUESTIONS[0]), params, use_tqdm=False)
    print(repr(alone.outputs[0].text))
    outputs = llm.chat([conversation(question) for question in QUESTIONS], sampling_params=params, use_tqdm=True)
    print(len(outputs), "answers")


if __name__ == "__main__":
    main()
