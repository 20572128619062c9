"""POST /v1/responses and the calls about its answers, with OpenAI's own client."""

import asyncio
from typing import Any

import openai
import orjson
import pytest

from pagoda_common.engine.convert import token_ids_from_bytes
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

TEXT = "An answer of some length, with 🙂 and 日本. Stop. Here."
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def test_an_answer_as_the_client_reads_it(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    response = await frontend.openai.responses.create(
        model=MODEL,
        input="hello",
        instructions="Be short.",
        max_output_tokens=200,
        temperature=0.5,
        metadata={"team": "a"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert response.status == "completed"
    assert response.output_text == TEXT
    assert response.id.startswith("resp_")
    assert (response.instructions, response.temperature, response.metadata) == ("Be short.", 0.5, {"team": "a"})
    message: Any = response.output[0]
    assert (message.role, message.status) == ("assistant", "completed")
    assert len(message.content[0].logprobs) == len(frontend.fake.script) + 1
    assert len(message.content[0].logprobs[0].top_logprobs) == 2
    assert response.usage is not None
    assert response.usage.output_tokens == len(frontend.fake.script) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    chat = await frontend.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
    )
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("streams", [True, False])
async def test_prompt_and_output_are_shown_raw_when_asked_for(
    frontend: Running, tokenizer: Tokenizer, streams: bool
) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    body: dict[str, Any] = {"input": "hello", "max_output_tokens": 200}
    raw: dict[str, Any] = {"extra_body": {"enable_response_messages": True}}
    if streams:
        stream = await frontend.openai.responses.create(model=MODEL, stream=True, **body, **raw)
        response: Any = [event async for event in stream][-1].response
    else:
        response = await frontend.openai.responses.create(model=MODEL, **body, **raw)
    [prompt], [output] = response.input_messages, response.output_messages
    assert (prompt["type"], output["type"]) == ("raw_message_tokens", "raw_message_tokens")
    assert prompt["tokens"] == list(token_ids_from_bytes(frontend.fake.submits[-1].prompt_token_ids, field="prompt"))
    assert prompt["message"] == tokenizer.decode(prompt["tokens"], skip_special_tokens=False)
    assert "hello" in prompt["message"]
    assert output["tokens"][:-1] == frontend.fake.script
    assert output["message"].startswith(TEXT)
    plain: Any = await frontend.openai.responses.create(model=MODEL, **body)
    assert not hasattr(plain, "input_messages")


async def test_a_stream_has_the_typed_events_in_order(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    stream = await frontend.openai.responses.create(model=MODEL, input="hello", max_output_tokens=200, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert events[0].response.output == []
    assert events[0].response.status == "in_progress"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-4].text == TEXT
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    whole = events[-1].response
    assert whole.output_text == TEXT
    assert whole.usage.output_tokens == len(frontend.fake.script) + 1
    kept = await frontend.openai.responses.retrieve(whole.id)
    assert kept.to_dict() == whole.to_dict()


async def test_an_event_with_an_id_counts_all_events_up_to_itself(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 200, "stream": True}
    response = await frontend.post(PATH, body)
    counts = []
    for event in response.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        if "id" in fields:
            counts.append(int(fields["id"].rpartition("@")[2]))
            assert counts[-1] == orjson.loads(fields["data"])["sequence_number"] + 1
    assert len(counts) > 5
    assert counts == sorted(counts)


async def test_the_clients_stream_helper_follows(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    async with frontend.openai.responses.stream(model=MODEL, input="hello", max_output_tokens=200) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == TEXT


async def test_an_answer_that_is_cut_off_is_incomplete(frontend: Running) -> None:
    response = await frontend.openai.responses.create(model=MODEL, input="hello", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    message: Any = response.output[0]
    assert message.status == "incomplete"
    stream = await frontend.openai.responses.create(model=MODEL, input="hello", max_output_tokens=3, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"


async def test_a_long_input_is_cut_when_it_may_be(frontend: Running) -> None:
    long = "word " * 2000
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await frontend.openai.responses.create(model=MODEL, input=long, max_output_tokens=4)
    response = await frontend.openai.responses.create(model=MODEL, input=long, max_output_tokens=4, truncation="auto")
    assert response.usage is not None
    assert response.usage.total_tokens <= 512


async def test_a_conversation_goes_on_from_a_stored_answer(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode("Blue.")
    create = frontend.openai.responses.create
    first = await create(model=MODEL, input="My colour?", instructions="Be short.", max_output_tokens=20)
    second = await create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=20)
    stream = await create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=20, stream=True)
    async for _ in stream:
        pass
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "My colour?"}]},
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "message", "role": "user", "content": "Why?"},
    ]
    await create(model=MODEL, input=given, max_output_tokens=20, store=False)
    _, *prompts = [submit.prompt_token_ids for submit in frontend.fake.submits]
    assert prompts[0] == prompts[1] == prompts[2]  # the instructions belong to their own turn
    assert second.previous_response_id == first.id
    third = await create(model=MODEL, input="And?", previous_response_id=second.id, max_output_tokens=20)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


async def test_what_is_stored_can_be_deleted_and_what_is_not_cannot_be_found(frontend: Running) -> None:
    responses = frontend.openai.responses
    kept = await responses.create(model=MODEL, input="x", max_output_tokens=2)
    dropped = await responses.create(model=MODEL, input="x", max_output_tokens=2, store=False)
    await responses.delete(kept.id)
    for response_id in (kept.id, dropped.id, "resp_of_nobody"):
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await responses.cancel(response_id)
        with pytest.raises(openai.NotFoundError):
            await responses.create(model=MODEL, input="x", previous_response_id=response_id)


async def test_the_store_is_bounded_and_keeps_the_newest() -> None:
    async with running_frontend(max_stored_responses=2) as running:
        ids = [(await running.openai.responses.create(model=MODEL, input="x", max_output_tokens=2)).id for _ in "abc"]
        with pytest.raises(openai.NotFoundError):
            await running.openai.responses.retrieve(ids[0])
        for response_id in ids[1:]:
            assert (await running.openai.responses.retrieve(response_id)).id == response_id


async def test_an_answer_is_found_only_with_the_key_that_asked_for_it() -> None:
    async with running_frontend(api_key=("mine", "other")) as running:
        mine, other = (running.openai.with_options(api_key=key).responses for key in ("mine", "other"))
        response = await mine.create(model=MODEL, input="x", max_output_tokens=2)
        assert (await mine.retrieve(response.id)).id == response.id
        with pytest.raises(openai.NotFoundError):
            await other.retrieve(response.id)


async def test_in_the_background(frontend: Running) -> None:
    responses = frontend.openai.responses
    frontend.fake.is_paused = True
    response = await responses.create(model=MODEL, input="x", max_output_tokens=5, background=True)
    assert response.status == "queued"
    assert (await responses.retrieve(response.id)).status == "queued"
    frontend.fake.is_paused = False
    async with asyncio.timeout(240):
        while (response := await responses.retrieve(response.id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert response.status == "incomplete"
    assert (await responses.cancel(response.id)).status == "incomplete"


async def test_cancelling_ends_what_is_made_in_the_background(frontend: Running) -> None:
    responses = frontend.openai.responses
    frontend.fake.step_s = 0.01
    response = await responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    await until(lambda: frontend.fake.num_open_sequences == 1)
    assert (await responses.cancel(response.id)).status == "cancelled"
    assert (await responses.retrieve(response.id)).status == "cancelled"
    await until(lambda: frontend.fake.num_open_sequences == 0)
    assert frontend.server.serving.num_open == 0
    foreground = await responses.create(model=MODEL, input="x", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="background"):
        await responses.cancel(foreground.id)


async def test_a_background_stream_goes_on_without_its_reader_and_can_be_read_again(frontend: Running) -> None:
    responses = frontend.openai.responses
    frontend.fake.step_s = 0.005
    stream = await responses.create(model=MODEL, input="x", max_output_tokens=40, background=True, stream=True)
    first: Any = await anext(aiter(stream))
    await stream.close()
    again: list[Any] = [event async for event in await responses.retrieve(first.response.id, stream=True)]
    assert again[-1].type == "response.incomplete"
    assert [event.sequence_number for event in again] == list(range(len(again)))
    tail: list[Any] = [
        event async for event in await responses.retrieve(first.response.id, stream=True, starting_after=5)
    ]
    assert [event.sequence_number for event in tail] == list(range(6, len(again)))


async def test_an_answer_that_is_long_in_coming_is_announced(frontend: Running) -> None:
    frontend.fake.is_paused = True
    stream = await frontend.openai.responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True)
    events = aiter(stream)
    kinds = [(await anext(events)).type for _ in range(2)]
    assert kinds == ["response.created", "response.in_progress"]
    assert not frontend.fake.aborted
    frontend.fake.is_paused = False
    assert [event.type async for event in events][-1] == "response.incomplete"
    frontend.fake.is_paused = True
    stream = await frontend.openai.responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: len(frontend.fake.aborted) == 1)


async def test_a_client_that_leaves_ends_its_answer(frontend: Running) -> None:
    frontend.fake.step_s = 0.01
    extra = {"ignore_eos": True}
    stream = await frontend.openai.responses.create(model=MODEL, input="x", stream=True, extra_body=extra)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: len(frontend.fake.aborted) == 1)
    await until(lambda: frontend.server.serving.num_open == 0)


async def test_a_failure_in_a_stream_is_an_event(frontend: Running) -> None:
    frontend.fake.step_s = 0.01
    extra = {"ignore_eos": True}
    stream = await frontend.openai.responses.create(model=MODEL, input="x", stream=True, extra_body=extra)
    events = aiter(stream)
    await anext(events)
    draining = asyncio.create_task(frontend.server.drain(0.0))
    last: Any = [event async for event in events][-1]
    await draining
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": [{"type": "message", "content": "x"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y"}]}, "input"),
    ({"input": []}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"model": "another"}, "model"),
    ({"input": "word " * 3000}, "input"),
]


async def test_bad_requests_name_the_field_as_it_was_given(frontend: Running) -> None:
    for fields, name in BAD:
        for stream in (False, True):
            response = await frontend.post(PATH, {"model": MODEL, "input": "x", "stream": stream, **fields})
            assert response.status_code in (400, 404), (fields, response.text)
            assert response.json()["error"]["param"] == name, (fields, response.text)
    assert not frontend.fake.submits


async def test_the_input_of_an_answer_is_read_in_pages(frontend: Running) -> None:
    responses = frontend.openai.responses
    first = await responses.create(model=MODEL, input="hello", max_output_tokens=3)
    given: list[Any] = [
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        {"role": "user", "content": [{"type": "input_text", "text": "and now?"}]},
    ]
    second = await responses.create(model=MODEL, input=given, max_output_tokens=3)
    items: list[Any] = [item async for item in responses.input_items.list(second.id, limit=2, order="asc")]
    kinds = ["message", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == kinds
    assert items[0].id == first.output[0].id
    assert (items[1].content[0].type, items[1].content[0].text) == ("output_text", "I look.")
    assert (items[3].call_id, items[3].output) == ("c1", "nothing")
    assert len({item.id for item in items}) == 5
    newest: list[Any] = [item async for item in responses.input_items.list(second.id)]
    assert newest == items[::-1]
    [text] = (await responses.input_items.list(first.id)).data
    assert text.content[0].text == "hello"  # type: ignore[union-attr]  # a message
    for query in ("limit=0", "limit=101", "order=up", "after=unknown"):
        answer = await frontend.http.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]
    assert (await frontend.http.get("/v1/responses/resp_unknown/input_items")).status_code == 404
