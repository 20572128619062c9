"""LangChain's ChatOpenAI against Pagoda: invoke, stream, batch, a chain, tools and structured output.

pip install langchain-openai; python examples/clients/langchain_client.py --base-url http://127.0.0.1:8000/v1
"""

import argparse

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


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
    model = ChatOpenAI(
        base_url=args.base_url, api_key=args.api_key, model=args.model, temperature=0, max_tokens=100, max_retries=0
    )

    question = [HumanMessage("Tell me a short story.")]
    answer = model.invoke(question)
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] <= 100
    print(f"invoke: {answer.content!r}")

    pieces = [chunk.content for chunk in model.stream(question)]
    assert "".join(pieces) == answer.content
    print(f"stream: {len(pieces)} pieces")

    # Several conversations at once; the engine batches them.
    answers = model.batch([question, [HumanMessage("Hello!")], question])
    assert answers[0].content == answers[2].content == answer.content
    print(f"batch: {answers[1].content!r}")

    chain = (
        ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | model | StrOutputParser()
    )
    capital = chain.invoke({"country": "France"})
    assert capital
    print(f"chain: {capital!r}")

    # A tool that must be called. The model may choose by itself (tool_choice "auto") where the server was started with
    # --enable-auto-tool-choice and the --tool-call-parser of the model.
    with_tool = model.bind_tools([get_weather], tool_choice="get_weather")
    [call] = with_tool.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    print(f"tool: {call['args']} -> {get_weather.invoke(call['args'])!r}")

    found = model.with_structured_output(Person).invoke("Who is this about, and how old? Anna is 7 years old.")
    assert isinstance(found, Person)
    print(f"structured: {found!r}")


if __name__ == "__main__":
    main()
