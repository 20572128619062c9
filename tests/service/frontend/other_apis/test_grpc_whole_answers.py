"""Every field of every answer of pagoda.v1.Inference, for one known output, and what the engine is asked."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.version import VERSION
from pagoda_frontend.grpc import servicer
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.frontend.harness import Running, running_frontend

HELLO, THERE, END = 1213, 518, 0
CHAT_PROMPT = [1, 579, 267, 202, 260, 284, 82, 2, 202, 1, 292, 312, 298, 202]
"""The user's "hello" with the template around it."""
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def cached(frontend: Running) -> Running:
    """A frontend whose engine says "Hello there" in one step, and found two tokens of the prompt."""
    frontend.fake.script, frontend.fake.tokens_per_step = [HELLO, THERE], 9
    frontend.fake.num_cached_tokens = 2
    return frontend


def stub_of(running: Running) -> Any:
    return inference_pb2_grpc.InferenceStub(running.channel)


def logprobs(*token_ids: int) -> list[inference_pb2.TokenLogprobs]:
    """As the fake makes them, with one alternative: the token itself."""
    return [
        inference_pb2.TokenLogprobs(logprob=-0.5, rank=1, top=[inference_pb2.TopLogprob(token_id=one, logprob=-0.5)])
        for one in token_ids
    ]


def generated(prompt: int = 3, **fields: Any) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(num_prompt_tokens=prompt, num_output_tokens=3, num_cached_tokens=2)
    whole = {"text": "Hello there", "token_ids": [HELLO, THERE, END], "finish_reason": STOP, "usage": usage}
    return inference_pb2.GenerateResponse(request_id="r", **(whole | fields))


def prompt_of(*ids: int) -> types_pb2.TokenIds:
    return types_pb2.TokenIds(ids=ids)


async def test_generate_unary_and_the_one_message_of_a_stream(cached: Running) -> None:
    stub = stub_of(cached)
    params = types_pb2.SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1, n=2)
    request = inference_pb2.GenerateRequest(
        request_id="r", token_ids=prompt_of(5, 6, 7), sampling_params=params, priority=-4, cache_salt="s", model="alias"
    )
    whole = [
        generated(logprobs=logprobs(HELLO, THERE, END), prompt_logprobs=logprobs(6, 7), index=index)
        for index in range(2)
    ]
    answer = await stub.GenerateUnary(request, metadata=[("x-tenant-id", "one")])
    assert answer == inference_pb2.GenerateUnaryResponse(request_id="r", outputs=whole)
    [submit] = cached.fake.submits
    assert (submit.priority, submit.cache_salt, submit.tenant) == (-4, "s", "one")
    assert submit.request_id.startswith("r-")
    assert sorted([one async for one in stub.Generate(request)], key=lambda one: one.index) == whole


def joined(messages: list[Any]) -> list[Any]:
    """Messages of a stream as one for each index: how many tokens come together is left to chance."""
    whole: dict[int, Any] = {}
    for one in messages:
        before = whole.setdefault(one.index, type(one)())
        assert one.offset == len(before.token_ids), "each sequence counts for itself"
        assert (before.finish_reason, before.HasField("usage")) == (0, False), "the last message ends it"
        text = "text" if isinstance(one, inference_pb2.GenerateResponse) else "content"
        told = getattr(before, text) + getattr(one, text)
        before.MergeFrom(one)
        setattr(before, text, told)
        before.offset = 0
    return [whole[index] for index in sorted(whole)]


async def test_messages_of_a_stream_make_the_whole(cached: Running) -> None:
    cached.fake.tokens_per_step = 1
    params = types_pb2.SamplingParams(n=2, logprobs=1)
    request = inference_pb2.GenerateRequest(request_id="r", token_ids=prompt_of(5, 6, 7), sampling_params=params)
    told = [one async for one in stub_of(cached).Generate(request)]
    assert len(told) > 2
    assert joined(told) == [generated(logprobs=logprobs(HELLO, THERE, END), index=index) for index in range(2)]


async def test_ends_of_a_sequence(cached: Running) -> None:
    stub = stub_of(cached)

    async def ended(stop: Any = (), **params: Any) -> inference_pb2.GenerateResponse:
        request = inference_pb2.GenerateRequest(
            request_id="r", token_ids=prompt_of(5, 6, 7), stop=stop, sampling_params=types_pb2.SamplingParams(**params)
        )
        [output] = (await stub.GenerateUnary(request)).outputs
        return output

    usage = inference_pb2.Usage(num_prompt_tokens=3, num_output_tokens=2, num_cached_tokens=2)
    two = {"token_ids": [HELLO, THERE], "usage": usage}
    assert await ended() == generated()
    assert await ended(max_tokens=2) == generated(finish_reason=LENGTH, **two)
    assert await ended(stop_token_ids=[THERE]) == generated(text="Hello", stop_token_id=THERE, **two)
    assert await ended(stop=[" th"]) == generated(text="Hello", stop_string=" th", **two)


def message(**fields: Any) -> inference_pb2.ChatResponse:
    usage = inference_pb2.Usage(num_prompt_tokens=len(CHAT_PROMPT), num_output_tokens=3, num_cached_tokens=2)
    whole = {"content": "Hello there", "token_ids": [HELLO, THERE, END], "finish_reason": STOP, "usage": usage}
    return inference_pb2.ChatResponse(request_id="r", **(whole | fields))


async def test_chat_unary_and_its_stream(cached: Running) -> None:
    stub = stub_of(cached)
    user = inference_pb2.ChatMessage(role="user", content="hello")
    params = types_pb2.SamplingParams(logprobs=1)
    request = inference_pb2.ChatRequest(
        request_id="r", messages=[user], sampling_params=params, priority=7, cache_salt="s", model="tiny"
    )
    whole = message(logprobs=logprobs(HELLO, THERE, END))
    answer = await stub.ChatUnary(request, metadata=[("x-tenant-id", "one")])
    assert answer == inference_pb2.ChatUnaryResponse(request_id="r", messages=[whole])
    [submit] = cached.fake.submits
    assert (submit.priority, submit.cache_salt, submit.tenant) == (7, "s", "one")
    assert submit.prompt_token_ids == b"".join(one.to_bytes(4, "little") for one in CHAT_PROMPT)
    assert [one async for one in stub.Chat(request)] == [whole]
    cached.fake.tokens_per_step = 1
    request.sampling_params.n = 3
    told = [one async for one in stub.Chat(request)]
    assert len(told) > 3
    assert joined(told) == [message(logprobs=logprobs(HELLO, THERE, END), index=index) for index in range(3)]


async def test_ids_are_drawn_where_none_is_given(frontend: Running) -> None:
    stub = stub_of(frontend)
    user = inference_pb2.ChatMessage(role="user", content="hello")
    given = [inference_pb2.EmbedInput(text="hello")]
    answers = {
        "gen-": await stub.GenerateUnary(inference_pb2.GenerateRequest(text="hello")),
        "chat-": await stub.ChatUnary(inference_pb2.ChatRequest(messages=[user])),
        "embd-": await stub.Embed(inference_pb2.EmbedRequest(inputs=given)),
        "pool-": await stub.Pool(inference_pb2.PoolRequest(inputs=given)),
        "score-": await stub.Score(inference_pb2.ScoreRequest(queries=["a"], documents=["b"])),
        "rerank-": await stub.Rerank(inference_pb2.RerankRequest(query="a", documents=["b"])),
    }
    for prefix, answer in answers.items():
        assert answer.request_id.startswith(prefix)
        assert len(answer.request_id) == len(prefix) + 32
    for name in ("Generate", "Chat"):
        request = getattr(inference_pb2, f"{name}Request")()
        request.MergeFrom(type(request)(**({"text": "hello"} if name == "Generate" else {"messages": [user]})))
        first = await anext(aiter(getattr(stub, name)(request)))
        assert first.request_id.startswith("gen-" if name == "Generate" else "chat-")


@pytest.mark.parametrize(("size", "is_taken"), [(128, True), (129, False)])
async def test_the_length_of_an_id(frontend: Running, size: int, is_taken: bool) -> None:
    stub = stub_of(frontend)
    user = inference_pb2.ChatMessage(role="user", content="hello")
    for call in (
        lambda: stub.GenerateUnary(inference_pb2.GenerateRequest(text="a", request_id="x" * size)),
        lambda: stub.ChatUnary(inference_pb2.ChatRequest(messages=[user], request_id="x" * size)),
        lambda: stub.Embed(inference_pb2.EmbedRequest(inputs=[{"text": "a"}], request_id="x" * size)),
    ):
        if is_taken:
            assert (await call()).request_id == "x" * size  # before the next one begins: an id is in use until then
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call()
        assert caught.value.details() == f"request_id has {size} characters, at most 128 are allowed"


async def test_tokenize_and_detokenize(frontend: Running) -> None:
    tokenizer, stub = Tokenizer.load("pagoda-tiny"), stub_of(frontend)
    ids = tokenizer.encode("Hello there", add_special_tokens=False)
    answer = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Hello there", return_token_strs=True))
    strings = ["Hello", "Ġthere"]
    assert answer == inference_pb2.TokenizeResponse(token_ids=ids, token_strs=strings, max_model_len=512)
    plain = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Hello there", model="alias"))
    assert plain == inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=512)
    user = inference_pb2.ChatMessage(role="user", content="hello")
    chat = await stub.Tokenize(inference_pb2.TokenizeRequest(messages=[user]))
    assert chat == inference_pb2.TokenizeResponse(token_ids=CHAT_PROMPT, max_model_len=512)
    short = await stub.Tokenize(inference_pb2.TokenizeRequest(messages=[user], add_generation_prompt=False))
    assert list(short.token_ids) == CHAT_PROMPT[:-5]
    for skips, text in ((False, "<|im_start|>Hello"), (True, "Hello")):
        asked = inference_pb2.DetokenizeRequest(token_ids=[1, HELLO], skip_special_tokens=skips)
        told = (await stub.Detokenize(asked)).text
        assert (told == "Hello") == skips, text
    for request in (
        inference_pb2.TokenizeRequest(text="a", model="gpt-9"),
        inference_pb2.DetokenizeRequest(token_ids=[1], model="gpt-9"),
    ):
        name = type(request).__name__.removesuffix("Request")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, name)(request)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[3071, 3072]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_facts_of_model_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeScheduler()
    async with running_frontend(fake) as running:
        stub = stub_of(running)
        info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        assert info == inference_pb2.GetModelInfoResponse(
            model_info=fake.model_info, served_model_names=["tiny", "alias"]
        )
        started_s = running.server.serving.started_s
        monkeypatch.setattr(servicer, "time", SimpleNamespace(monotonic=lambda: started_s + 12.5))
        server = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert server == inference_pb2.GetServerInfoResponse(version=VERSION, uptime_s=12.5, load=fake.load)


async def test_what_an_abort_does_not_know_is_counted(frontend: Running) -> None:
    for ids, message_ in (
        (["a"], "request 'a' is not open at this frontend"),
        (["a", "b"], "request 'a' and 1 more is not open at this frontend"),
        (["a", "b", "c"], "request 'a' and 2 more is not open at this frontend"),
        (["x" * 200], f"request {'x' * 128!r} is not open at this frontend"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(frontend).Abort(inference_pb2.AbortGenerationRequest(request_ids=ids))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, message_)
    empty = await stub_of(frontend).Abort(inference_pb2.AbortGenerationRequest())
    assert empty == inference_pb2.AbortGenerationResponse()


async def test_a_place_to_resume_from_goes_with_streams_alone(frontend: Running) -> None:
    stub, place = stub_of(frontend), inference_pb2.ResumeFrom(request_id="r")
    for call in (
        stub.GenerateUnary(inference_pb2.GenerateRequest(text="a", resume_from=place)),
        stub.ChatUnary(inference_pb2.ChatRequest(resume_from=place)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.details() == "resume_from needs a streaming call, this call is unary"
    assert not frontend.fake.submits
