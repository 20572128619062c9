"""/v1/embeddings, and Embed over gRPC, in front of a fake engine: inputs, answers, and what is refused."""

import asyncio
import base64
from typing import Any

import grpc
import numpy as np
import openai
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.errors import QueueFull
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

PATH = "/v1/embeddings"
LONGEST = 512


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def embed(frontend: Running, given: Any, **fields: Any) -> dict[str, Any]:
    response = await frontend.post(PATH, {"model": MODEL, "input": given, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(frontend: Running, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = await frontend.post(PATH, {"model": MODEL, **body})
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def expected(token_ids: list[int]) -> list[float]:
    """What the fake says."""
    return [float(len(token_ids)), float(token_ids[-1]), 0.0, 0.0]


async def test_every_form_of_input(frontend: Running, tokenizer: Tokenizer) -> None:
    text, other = "Once upon a time", "The dog"
    ids, other_ids = tokenizer.encode(text), tokenizer.encode(other)
    for given, prompts in (
        (text, [ids]),
        ([text], [ids]),
        ([text, other], [ids, other_ids]),
        (ids, [ids]),
        ([ids, other_ids, [7]], [ids, other_ids, [7]]),
    ):
        answer = await embed(frontend, given)
        assert [one["embedding"] for one in answer["data"]] == [expected(prompt) for prompt in prompts]
        assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
        assert {one["object"] for one in answer["data"]} == {"embedding"}
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
        assert {name: answer["usage"][name] for name in usage} == usage
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("list", MODEL, "embd-")
    assert {submit.sampling_params.n for submit in frontend.fake.submits} == {1}
    assert all(submit.HasField("pooling") for submit in frontend.fake.submits)


async def test_base64_is_of_float32(frontend: Running) -> None:
    answer = await embed(frontend, [[5, 6, 7], [8]], encoding_format="base64", dimensions=4)
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in answer["data"]]
    assert decoded == [expected([5, 6, 7]), expected([8])]


async def test_the_openai_package_reads_both_formats(frontend: Running) -> None:
    formats: tuple[dict[str, Any], ...] = ({}, {"encoding_format": "float"}, {"encoding_format": "base64"})
    for options in formats:
        answer = await frontend.openai.embeddings.create(model=MODEL, input=[[5, 6], [7, 8, 9]], **options)
        if options.get("encoding_format") != "base64":  # which it asks for by itself, and decodes then alone
            assert [one.embedding for one in answer.data] == [expected([5, 6]), expected([7, 8, 9])]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        await frontend.openai.embeddings.create(model=MODEL, input=[])


@pytest.mark.parametrize(
    ("fields", "last"),
    [({}, 0), ({"use_activation": False}, -1), ({"normalize": False}, -1), ({"normalize": True}, 0)],
)
async def test_normalisation_may_be_left_out(frontend: Running, fields: dict[str, bool], last: int) -> None:
    answer = await embed(frontend, [5], **fields)
    assert answer["data"][0]["embedding"][-1] == last


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "input is empty: it must have at least one entry"),
        ({"input": ""}, "input", "input is empty: it must have at least one token"),
        ({"input": ["a", ""]}, "input", "input.1 is empty"),
        ({"input": [[1], []]}, "input", "input.1 is empty"),
        ({"input": [[]]}, "input", "input is empty"),
        ({"input": [1, "a"]}, "input", "input"),
        ({"input": None}, "input", "input"),
        ({"input": {"text": "a"}}, "input", "input"),
        ({"input": [3072]}, "input", "token id 3072 is out of vocabulary"),
        ({"input": [-1]}, "input", "token id -1 is out of vocabulary"),
        ({"input": [5] * (LONGEST + 1)}, "input", f"maximum context length is {LONGEST} tokens, but an input has 513"),
        ({"input": "word " * 600}, "input", f"maximum context length is {LONGEST} tokens"),
        ({"input": [[1]] * 2049}, "input", "there may be at most 2048 inputs, got 2049"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float', 'base64', 'bytes' or 'bytes_only'"),
        ({"input": "a", "dimensions": 2}, "dimensions", "dimensions must be 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be 4"),
        ({"input": "a", "dimensions": "four"}, "dimensions", "integer"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'float32', 'float16', 'bfloat16'"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "must be at most 512"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "cache_salt must not be empty"),
        ({"input": "a", "timeout": 0}, "timeout", "timeout must be greater than 0"),
    ],
)
async def test_what_is_wrong_is_named(frontend: Running, body: dict[str, Any], param: str, message: str) -> None:
    error = await refused(frontend, body)
    assert (error["param"].split(".")[0], error["code"]) == (param, 400)
    assert message in error["message"]
    assert frontend.fake.submits == []


async def test_an_unknown_model_is_404(frontend: Running) -> None:
    assert (await refused(frontend, {"model": "other", "input": "a"}, 404))["param"] == "model"


async def test_an_input_may_fill_the_context_and_be_cut_to_it(frontend: Running) -> None:
    whole = [*range(5, 5 + LONGEST)]
    assert (await embed(frontend, whole))["data"][0]["embedding"] == expected(whole)
    long = [9, *whole]
    left = await embed(frontend, long, truncate_prompt_tokens=-1)
    assert left["data"][0]["embedding"] == expected(whole)
    right = await embed(frontend, long, truncate_prompt_tokens=3, truncation_side="right")
    assert right["data"][0]["embedding"] == expected([9, 5, 6])
    assert right["usage"]["prompt_tokens"] == 3


async def test_a_refused_or_failed_input_fails_the_call(frontend: Running) -> None:
    frontend.fake.reject["*"] = QueueFull("7 sequences are waiting, max_num_queued_reqs is 7", retry_after_s=1)
    error = await refused(frontend, {"input": ["a", "b"]}, 503)
    assert "max_num_queued_reqs" in error["message"]
    frontend.fake.reject.clear()
    frontend.fake.is_paused = True
    error = await refused(frontend, {"input": ["a", "b"], "timeout": 0.2}, 504)
    assert "0.2 s" in error["message"]
    await until(lambda: frontend.fake.num_open_sequences == 0)
    assert set(frontend.fake.aborted[-2:]) == {submit.request_id for submit in frontend.fake.submits[-2:]}


async def test_a_lost_scheduler_is_a_pause(frontend: Running) -> None:
    frontend.fake.is_paused = True
    waiting = asyncio.create_task(embed(frontend, [[5, 6], [7]]))
    await until(lambda: frontend.fake.num_open_sequences == 2)
    frontend.fake.restart()
    frontend.fake.is_paused = False
    answer = await waiting
    assert [one["embedding"] for one in answer["data"]] == [expected([5, 6]), expected([7])]
    assert frontend.fake.errors == []


async def test_an_engine_that_does_not_pool_is_501(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_frontend() as frontend:
        frontend.fake.model_info.embedding_size = 0
        monkeypatch.setattr(frontend.fake, "embedding", lambda prompt_token_ids, *, is_unit=True: b"")
        error = await refused(frontend, {"input": "a"}, 501)
        assert error["message"] == "the engine does not support pooling"


async def test_it_is_counted(frontend: Running) -> None:
    await embed(frontend, [[5, 6, 7], [8]])
    text = (await frontend.http.get("/metrics")).text
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="{MODEL}"}} 4.0' in text
    assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{MODEL}"}} 2.0' in text
    assert f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 0.0' in text


def input_of(given: str | list[int]) -> inference_pb2.EmbedInput:
    if isinstance(given, str):
        return inference_pb2.EmbedInput(text=given)
    return inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=given))


async def test_grpc_gives_the_same(frontend: Running, tokenizer: Tokenizer) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
    inputs: list[str | list[int]] = ["Once upon a time", [5, 6, 7], [9] * LONGEST]
    request = inference_pb2.EmbedRequest(inputs=map(input_of, inputs), request_id="mine")
    answer = await stub.Embed(request)
    prompts: list[Any] = [tokenizer.encode("Once upon a time"), *inputs[1:]]
    assert [list(one.values) for one in answer.embeddings] == [expected(prompt) for prompt in prompts]
    assert (answer.request_id, answer.usage.num_output_tokens) == ("mine", 0)
    assert answer.usage.num_prompt_tokens == sum(map(len, prompts))
    request.pooling.normalize = False
    assert {one.values[-1] for one in (await stub.Embed(request)).embeddings} == {-1.0}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs is empty: it must have at least one entry"),
        ([""], "inputs is empty: it must have at least one token"),
        ([[5], []], "inputs.1 is empty"),
        ([[3072]], "token id 3072 is out of vocabulary"),
        ([[5] * (LONGEST + 1)], "but an input has 513 tokens"),
    ],
)
async def test_grpc_names_what_is_wrong(frontend: Running, inputs: list[Any], message: str) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(inference_pb2.EmbedRequest(inputs=map(input_of, inputs)))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (raised.value.details() or "")
    assert frontend.fake.submits == []


async def test_grpc_calls_end_as_others_do(frontend: Running) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
    frontend.fake.is_paused = True
    request = inference_pb2.EmbedRequest(inputs=[input_of([5]), input_of([6])], request_id="mine")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(request, timeout=0.2)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: frontend.fake.num_open_sequences == 0)
    waiting = asyncio.ensure_future(stub.Embed(request))
    await until(lambda: frontend.fake.num_open_sequences == 2)
    await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["mine"]))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await waiting
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    request.model = "other"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(request)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
