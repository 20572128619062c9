"""POST /v1/messages with Anthropic's own client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from pagoda_common.engine.convert import token_ids_from_bytes
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

TEXT = "An answer of some length, with 🙂 and 日本. Stop. Here."
PATH = "/v1/messages"
ASKED: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


@contextlib.asynccontextmanager
async def client_of(running: Running, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=str(running.http.base_url), api_key=key, max_retries=0) as client:
        yield client


async def test_an_answer_as_the_client_reads_it(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    async with client_of(frontend) as client:
        message = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=200, system="Be short.")
    [block] = message.content
    assert block.type == "text"
    assert block.text == TEXT
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == len(frontend.fake.script) + 1
    chat = await frontend.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
    )
    assert chat.usage is not None
    assert message.usage.input_tokens == chat.usage.prompt_tokens


async def test_a_stream_has_the_events_in_order_and_the_same_message(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    frontend.fake.num_cached_tokens = 1
    async with client_of(frontend) as client:
        stream = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=200, stream=True)
        events: list[Any] = [event async for event in stream]
        async with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=200) as helper:
            texts = [text async for text in helper.text_stream]
            final = await helper.get_final_message()
        whole = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=200)
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        *("message_start", "content_block_start", *["content_block_delta"] * deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start, end = events[0].message, events[-2]
    assert (start.content, start.stop_reason) == ([], None)
    assert start.usage.input_tokens == whole.usage.input_tokens
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert whole.usage.cache_read_input_tokens == 1
    assert "".join(texts) == TEXT
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage == whole.usage


@pytest.mark.parametrize("others", [[], [{"type": "text", "text": "Be short."}]])
async def test_the_header_that_claude_code_bills_by_is_no_part_of_the_prompt(frontend: Running, others: Any) -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli;"}
    async with client_of(frontend) as client:
        for system in ([header, *others], others or anthropic.omit):
            await client.messages.create(model=MODEL, messages=ASKED, max_tokens=1, system=system)
    first, second = (submit.prompt_token_ids for submit in frontend.fake.submits[-2:])
    assert first == second


async def test_why_it_stopped(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    async with client_of(frontend) as client:
        message = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=200, stop_sequences=["Stop"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Stop")
        message = await client.messages.create(model=MODEL, messages=ASKED, max_tokens=2)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_blocks_are_one_conversation(frontend: Running) -> None:
    text = {"type": "text", "text": "hello"}
    ways: list[dict[str, Any]] = [
        {"system": "Be short.", "messages": ASKED},
        {"system": [{"type": "text", "text": "Be short."}], "messages": [{"role": "user", "content": [text]}]},
        {"messages": [{"role": "system", "content": "Be short."}, *ASKED]},
    ]
    async with client_of(frontend) as client:
        for way in ways:
            await client.messages.create(model=MODEL, max_tokens=1, **way)
            counted = await client.messages.count_tokens(model=MODEL, **way)
            assert counted.input_tokens == len(token_ids_from_bytes(frontend.fake.submits[-1].prompt_token_ids))
    assert len({submit.prompt_token_ids for submit in frontend.fake.submits}) == 1


async def test_an_answer_goes_on_from_its_beginning(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(" there.")
    turns: Any = [*ASKED, {"role": "assistant", "content": "Hello"}]
    async with client_of(frontend) as client:
        message = await client.messages.create(model=MODEL, messages=turns, max_tokens=20)
        counted = await client.messages.count_tokens(model=MODEL, messages=turns)
    assert message.content[0].to_dict()["text"] == " there."
    prompt = token_ids_from_bytes(frontend.fake.submits[-1].prompt_token_ids)
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("Hello")
    assert counted.input_tokens == len(prompt)


async def test_tokens_are_counted_beyond_the_context(frontend: Running) -> None:
    async with client_of(frontend) as client:
        long: Any = [{"role": "user", "content": "word " * 2000}]
        assert (await client.messages.count_tokens(model=MODEL, messages=long)).input_tokens > 512
    assert not frontend.fake.submits


async def test_a_failure_in_a_stream_is_an_event(frontend: Running) -> None:
    frontend.fake.step_s = 0.01
    async with client_of(frontend) as client:
        extra = {"ignore_eos": True}
        stream = await client.messages.create(
            model=MODEL, messages=ASKED, max_tokens=400, stream=True, extra_body=extra
        )
        events = aiter(stream)
        await anext(events)
        draining = asyncio.create_task(frontend.server.drain(0.0))
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            async for _ in events:
                pass
        await draining


async def test_a_client_that_leaves_ends_its_answer(frontend: Running) -> None:
    frontend.fake.step_s = 0.01
    async with client_of(frontend) as client:
        extra = {"ignore_eos": True}
        stream = await client.messages.create(
            model=MODEL, messages=ASKED, max_tokens=400, stream=True, extra_body=extra
        )
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: len(frontend.fake.aborted) == 1)


async def test_the_key_may_come_as_x_api_key() -> None:
    async with running_frontend(api_key=("secret",)) as running:
        async with client_of(running, "secret") as client:
            assert (await client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)).content
        async with client_of(running, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
        headers = {"Authorization": "Bearer secret"}
        body = {"messages": ASKED, "max_tokens": 1}
        assert (await running.post(PATH, body, headers=headers)).status_code == 200


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": None}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, 400, "messages"),
    ({"system": [{"type": "image"}]}, 400, "system"),
    ({"temperature": -1}, 400, "temperature"),
    ({"stop_sequences": [""]}, 400, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools"),
    ({"tool_choice": {"type": "tool"}}, 400, "tool_choice"),
    ({"output_config": {"format": {"type": "text"}}}, 400, "output_config"),
    ({"model": "another"}, 404, "model"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
]


async def test_errors_have_anthropics_shape(frontend: Running) -> None:
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    for fields, status, name in BAD:
        for stream in (False, True):
            body = {"model": MODEL, "messages": ASKED, "max_tokens": 5, "stream": stream, **fields}
            response = await frontend.post(PATH, body)
            assert response.status_code == status, (fields, response.text)
            answer = response.json()
            assert answer["type"] == "error"
            assert answer["error"]["type"] == kinds[status]
            assert name in answer["error"]["message"], (fields, answer)
    assert (await frontend.http.get(PATH)).json()["type"] == "error"
    assert (await frontend.http.post(PATH, content=b"{")).json()["type"] == "error"
    assert not frontend.fake.submits
