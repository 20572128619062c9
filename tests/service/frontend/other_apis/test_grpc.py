"""pagoda.v1.Inference over a real channel."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.errors import QueueFull
from pagoda_common.rpc.service import ErrorInterceptor
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.grpc.servicer import InferenceServicer
from tests.fakes.fake_scheduler import SAMPLED_LOGPROB, FakeScheduler
from tests.service.frontend.harness import Running, running_frontend, until

TEXT = "An answer of some length, with 🙂 and 日本. Stop. Here."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def ask(**fields: Any) -> inference_pb2.GenerateRequest:
    prompt: dict[str, Any] = {} if {"text", "token_ids", "chat"} & fields.keys() else {"text": "hello"}
    return inference_pb2.GenerateRequest(**prompt, **fields)


def stub_of(running: Running) -> Any:
    return inference_pb2_grpc.InferenceStub(running.channel)


async def test_generate_streams_what_generate_unary_gives(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    stub = stub_of(frontend)
    request = ask(sampling_params=types_pb2.SamplingParams(max_tokens=200, logprobs=2), request_id="mine")
    responses = [response async for response in stub.Generate(request)]
    assert "".join(response.text for response in responses) == TEXT
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens[:-1] == frontend.fake.script
    offsets = [response.offset for response in responses if response.token_ids]
    assert offsets == [sum(len(r.token_ids) for r in responses[:place]) for place in range(len(offsets))]
    last = responses[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.usage.num_output_tokens == len(tokens)
    assert last.request_id == "mine"
    unary = await stub.GenerateUnary(request)
    [output] = unary.outputs
    assert (output.text, list(output.token_ids)) == (TEXT, tokens)
    assert output.usage == last.usage
    assert len(output.logprobs) == len(tokens)
    assert output.logprobs[0].logprob == pytest.approx(-0.5)
    assert output.logprobs[0].top[0].token_id == tokens[0]


async def test_stop_strings_stop_tokens_and_n(frontend: Running, tokenizer: Tokenizer) -> None:
    stub = stub_of(frontend)
    params = types_pb2.SamplingParams(n=2, max_tokens=5, stop_token_ids=[113])
    answer = await stub.GenerateUnary(ask(token_ids=types_pb2.TokenIds(ids=[10]), sampling_params=params))
    assert [list(output.token_ids) for output in answer.outputs] == [[11, 12, 13, 14, 15], [111, 112, 113]]
    assert answer.outputs[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.outputs[1].stop_token_id == 113
    frontend.fake.script = tokenizer.encode(TEXT)
    answer = await stub.GenerateUnary(ask(stop=["Stop"], sampling_params=types_pb2.SamplingParams(max_tokens=200)))
    assert answer.outputs[0].text == TEXT.partition("Stop")[0]
    assert answer.outputs[0].stop_string == "Stop"


async def test_a_conversation_may_fill_the_context_and_a_text_gets_16_tokens(frontend: Running) -> None:
    stub = stub_of(frontend)
    messages = [inference_pb2.ChatMessage(role="user", content="hi")]
    params = types_pb2.SamplingParams(ignore_eos=True)
    chat = await stub.GenerateUnary(ask(chat=inference_pb2.ChatPrompt(messages=messages), sampling_params=params))
    usage = chat.outputs[0].usage
    assert usage.num_prompt_tokens + usage.num_output_tokens == 512
    text = await stub.GenerateUnary(ask(text="hi", sampling_params=params))
    assert text.outputs[0].usage.num_output_tokens == 16


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "text"),
    ({"text": "word " * 2000}, "text"),
    ({"token_ids": types_pb2.TokenIds()}, "token_ids"),
    ({"token_ids": types_pb2.TokenIds(ids=[99999])}, "token_ids"),
    ({"token_ids": types_pb2.TokenIds(ids=[5] * 512)}, "token_ids"),
    ({"chat": inference_pb2.ChatPrompt()}, "messages"),
    ({"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="")])}, "messages"),
    ({"sampling_params": types_pb2.SamplingParams(temperature=-1)}, "temperature"),
    ({"sampling_params": types_pb2.SamplingParams(temperature=float("nan"))}, "temperature"),
    ({"sampling_params": types_pb2.SamplingParams(top_p=0)}, "top_p"),
    ({"sampling_params": types_pb2.SamplingParams(top_k=-3)}, "top_k"),
    ({"sampling_params": types_pb2.SamplingParams(min_p=2)}, "min_p"),
    ({"sampling_params": types_pb2.SamplingParams(max_tokens=0)}, "max_tokens"),
    ({"sampling_params": types_pb2.SamplingParams(n=2, temperature=0)}, "n"),
    ({"sampling_params": types_pb2.SamplingParams(logprobs=21)}, "logprobs"),
    ({"sampling_params": types_pb2.SamplingParams(prompt_logprobs=21)}, "prompt_logprobs"),
    ({"sampling_params": types_pb2.SamplingParams(stop_token_ids=[99999])}, "stop_token_ids"),
    ({"sampling_params": types_pb2.SamplingParams(logit_bias={99999: 1.0})}, "logit_bias"),
    ({"stop": ["a"] * 129}, "stop"),
    ({"sampling_params": types_pb2.SamplingParams(bad_words_token_ids=[{"ids": [5, 99999]}])}, "bad_words_token_ids"),
    ({"stop": [""]}, "stop"),
    ({"beam_search": types_pb2.BeamSearchParams(length_penalty=99)}, "length_penalty"),
    (
        {"beam_search": types_pb2.BeamSearchParams(), "sampling_params": types_pb2.SamplingParams(logprobs=1)},
        "logprobs",
    ),
    (
        {"beam_search": types_pb2.BeamSearchParams(), "sampling_params": types_pb2.SamplingParams(min_tokens=1)},
        "min_tokens",
    ),
]


async def test_bad_requests_are_invalid_argument_and_name_the_field(frontend: Running) -> None:
    stub = stub_of(frontend)
    for fields, name in BAD:
        for call in (stub.GenerateUnary, _first_of(stub)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(ask(**fields))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            trailers = dict(caught.value.trailing_metadata() or ())
            assert name.encode() in trailers["grpc-status-details-bin"], fields
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(inference_pb2.GenerateRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len((await stub.GenerateUnary(ask())).outputs) == 1


def _first_of(stub: Any) -> Any:
    async def call(request: Any) -> Any:
        return await stub.Generate(request).read()

    return call


async def test_a_method_that_we_do_not_have_is_unimplemented(frontend: Running) -> None:
    for method in ("/pagoda.v1.Inference/Guess", "/pagoda.v1.Oracle/Ask", "/grpc.health.v1.Health/List"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await frontend.channel.unary_unary(method)(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED, method


async def test_a_malformed_message_is_invalid_argument(frontend: Running) -> None:
    unary = frontend.channel.unary_unary("/pagoda.v1.Inference/GenerateUnary")
    stream = frontend.channel.unary_stream("/pagoda.v1.Inference/Generate")
    for raw in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x2a\x02\x08", b"\x0a\x01\xff"):
        for call in (unary(raw), stream(raw).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len((await stub_of(frontend).GenerateUnary(ask())).outputs) == 1


async def test_other_errors_have_their_codes(frontend: Running) -> None:
    stub = stub_of(frontend)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(ask(model="gpt-9"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    frontend.fake.reject["*"] = QueueFull("too much is waiting", retry_after_s=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(ask())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata() or ())
    [detail] = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
    info = error_details_pb2.RetryInfo()
    assert detail.Unpack(info)
    assert info.retry_delay.seconds == 1


async def test_cancelling_and_aborting_end_the_request(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    stub = stub_of(frontend)
    request = ask(sampling_params=types_pb2.SamplingParams(max_tokens=400, ignore_eos=True), request_id="mine")
    call = stub.Generate(request)
    await call.read()
    call.cancel()
    await until(lambda: len(frontend.fake.aborted) == 1)
    request.request_id = "another"
    call = stub.Generate(request)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'another' is in use" in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # what is not known is said, what is known is aborted
        await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["unknown", "another"]))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    async with asyncio.timeout(240):
        while (await call.read()).finish_reason != types_pb2.FINISH_REASON_ABORT:
            pass
    await until(lambda: len(frontend.fake.aborted) == 2)


async def test_an_id_is_in_use_for_the_tenant_that_uses_it(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    stub = stub_of(frontend)
    params = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
    one, two = ([("x-tenant-id", tenant)] for tenant in ("one", "two"))
    call = stub.Generate(ask(sampling_params=params, request_id="mine"), metadata=one)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(ask(request_id="mine"), metadata=one)
    assert "'mine' is in use" in (caught.value.details() or "")
    for other in (two, []):
        answer = await stub.GenerateUnary(ask(request_id="mine"), metadata=other)
        assert answer.request_id == "mine"
    call.cancel()


async def test_only_the_key_that_started_a_request_aborts_it() -> None:
    async with running_frontend(api_key=("one", "two")) as frontend:
        frontend.fake.step_s = 0.005
        stub = stub_of(frontend)
        one, two = ([("authorization", f"Bearer {key}")] for key in ("one", "two"))
        params = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
        call = stub.Generate(ask(sampling_params=params, request_id="mine"), metadata=one)
        await call.read()
        abort = inference_pb2.AbortGenerationRequest(request_ids=["mine"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Abort(abort, metadata=two)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert not frontend.fake.aborted
        await stub.Abort(abort, metadata=one)
        await until(lambda: len(frontend.fake.aborted) == 1)


async def test_a_beam_search_is_what_it_is_over_http(frontend: Running) -> None:
    stub = stub_of(frontend)
    params = types_pb2.SamplingParams(n=2, max_tokens=4, temperature=0)
    beams = types_pb2.BeamSearchParams(beam_width=3, length_penalty=0.5, early_stopping=types_pb2.EARLY_STOPPING_NEVER)
    request = ask(token_ids=types_pb2.TokenIds(ids=[5, 6, 7]), sampling_params=params, beam_search=beams)
    answer = await stub.GenerateUnary(request)
    streamed = [response async for response in stub.Generate(request)]
    over_http = await frontend.complete(
        use_beam_search=True, n=2, best_of=3, length_penalty=0.5, early_stopping="never", max_tokens=4, temperature=0
    )
    assert [output.text for output in answer.outputs] == [choice["text"] for choice in over_http["choices"]]
    assert {one.index: one.text for one in streamed} == {one.index: one.text for one in answer.outputs}
    assert [output.cumulative_logprob for output in answer.outputs] == [4 * SAMPLED_LOGPROB] * 2
    searches = [submit.beam_search for submit in frontend.fake.submits]
    assert searches[0] == searches[1] == searches[2]
    assert searches[0] == beams
    plain = await stub.GenerateUnary(ask())
    assert not plain.outputs[0].HasField("cumulative_logprob")


async def test_a_call_that_ends_while_a_message_is_written_ends_its_request(frontend: Running) -> None:
    class Context:
        def __init__(self) -> None:
            self.callbacks: list[Any] = []

        def time_remaining(self) -> None:
            return None

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def invocation_metadata(self) -> None:
            return None

        def add_done_callback(self, callback: Any) -> None:
            self.callbacks.append(callback)

    async def read(request: Any, context: Any) -> Any:
        return request

    frontend.fake.step_s = 0.005
    context = Context()
    request = ask(sampling_params=types_pb2.SamplingParams(max_tokens=400, ignore_eos=True))
    servicer = InferenceServicer(serving=frontend.server.serving, engine=frontend.server.engine)
    responses = ErrorInterceptor()._wrap_stream(servicer.Generate, "Generate", read)(request, context)
    await anext(responses)
    context.callbacks[0](context)
    await until(lambda: len(frontend.fake.aborted) == 1)
    await until(lambda: frontend.server.serving.num_open == 0)


async def test_a_deadline_reaches_the_engine(frontend: Running) -> None:
    frontend.fake.is_paused = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub_of(frontend).GenerateUnary(ask(), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # the server's clock turns the wire's whole milliseconds back into a deadline: microseconds may be added
    assert frontend.fake.submits[-1].timeout_s == pytest.approx(0.3, abs=0.2)
    await until(lambda: frontend.server.serving.num_open == 0)


async def test_tokens_texts_and_facts(frontend: Running, tokenizer: Tokenizer) -> None:
    stub = stub_of(frontend)
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))
    assert list(tokens.token_ids) == tokenizer.encode(TEXT)
    text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == TEXT
    info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert (info.model_info.vocab_size, list(info.served_model_names)) == (3072, ["tiny", "alias"])
    server = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
    assert server.load.is_ready
    assert server.version


async def test_reflection_and_health(frontend: Running) -> None:
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(frontend.channel)
    [answer] = [response async for response in stub.ServerReflectionInfo(iter([listing]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {"pagoda.v1.Inference", "grpc.health.v1.Health"} <= names
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="pagoda.v1.Inference")
    [answer] = [response async for response in stub.ServerReflectionInfo(iter([symbol]))]
    assert answer.file_descriptor_response.file_descriptor_proto
    watch = health_pb2_grpc.HealthStub(frontend.channel).Watch(
        health_pb2.HealthCheckRequest(service="pagoda.v1.Inference")
    )
    async with asyncio.timeout(240):
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        frontend.fake.set_ready(False, "no worker")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_prompt_logprobs_come_with_the_last_message(frontend: Running) -> None:
    request = ask(
        token_ids=types_pb2.TokenIds(ids=[300, 301, 302]),
        sampling_params=types_pb2.SamplingParams(prompt_logprobs=1, max_tokens=3),
    )
    whole = (await stub_of(frontend).GenerateUnary(request)).outputs[0]
    assert [entry.logprob for entry in whole.prompt_logprobs] == [-0.5, -0.5]
    assert [[top.token_id for top in entry.top] for entry in whole.prompt_logprobs] == [[301], [302]]
    *earlier, last = [message async for message in stub_of(frontend).Generate(request)]
    assert last.prompt_logprobs == whole.prompt_logprobs
    assert not any(message.prompt_logprobs for message in earlier)


async def test_the_models_defaults_count_over_grpc_too() -> None:
    fake = FakeScheduler()
    fake.model_info.generation_config_json = '{"temperature": 0.5, "top_k": 9, "min_p": 0.25, "max_new_tokens": 5}'
    async with running_frontend(fake) as running:
        answer = await stub_of(running).GenerateUnary(ask(sampling_params=types_pb2.SamplingParams(max_tokens=9)))
        params = fake.submits[-1].sampling_params
        assert (params.temperature, params.top_k, params.min_p) == (0.5, 9, 0.25)
        assert len(answer.outputs[0].token_ids) == 5
        await stub_of(running).GenerateUnary(ask(sampling_params=types_pb2.SamplingParams(top_k=0, min_p=0)))
        params = fake.submits[-1].sampling_params
        assert (params.temperature, params.top_k, params.min_p) == (0.5, 0, 0)
