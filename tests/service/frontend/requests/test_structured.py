"""Constraints at the frontend: read from every kind of body, checked before the engine hears of them."""

import asyncio
import itertools
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.engine.convert import structured_outputs_from_proto
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from tests.service.frontend.harness import MODEL, Running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
MESSAGES = [{"role": "user", "content": "Hello"}]


def submitted(frontend: Running) -> StructuredOutputsParams | None:
    """The constraint of the last request that the engine got."""
    message = frontend.fake.submits[-1].sampling_params
    return structured_outputs_from_proto(message.structured_output) if message.HasField("structured_output") else None


CONSTRAINTS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        StructuredOutputsParams(json=SCHEMA),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        StructuredOutputsParams(json=SCHEMA),
    ),
    ({"response_format": TAG}, StructuredOutputsParams(structural_tag=TAG)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    ),
    ({"structured_outputs": {"regex": r"\d+"}}, StructuredOutputsParams(regex=r"\d+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
    ({"structured_outputs": {"grammar": 'root ::= "x"+'}}, StructuredOutputsParams(grammar='root ::= "x"+')),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputsParams(json_object=True)),
    ({"structured_outputs": {"structural_tag": TAG}}, StructuredOutputsParams(structural_tag=TAG)),
]


ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "Hi"}),
    ("chat/completions", {"messages": MESSAGES}),
]


async def test_a_constraint_reaches_the_engine(frontend: Running) -> None:
    for (body, expected), (path, prompt) in itertools.product(CONSTRAINTS, ENDPOINTS):
        response = await frontend.post(f"/v1/{path}", {"model": MODEL, "max_tokens": 3, **prompt, **body})
        assert response.status_code == 200, response.text
        assert submitted(frontend) == expected


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "nonsense"}}, "response_format", "must be one of text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format",
        "response_format.json_schema.schema: Invalid type: nonsense",
    ),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format", "structures"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs", "NUL"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs", "choice.1"),
    ({"structured_outputs": {"grammar": "root ::= other"}}, "structured_outputs", "other"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs", "other"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "JSON"),
    ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", "uniqueItems"),
    ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs", "262144 bytes"),
    ({"structured_outputs": {"regex": "a"}, "response_format": TAG}, "structured_outputs", "both"),
    ({"guided_json": SCHEMA}, "guided_json", "structured_outputs.json"),
    ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
]


async def test_a_bad_constraint_is_a_400_that_the_engine_never_sees(frontend: Running) -> None:
    for (body, field, message), (path, prompt), stream in itertools.product(FAULTS, ENDPOINTS, (False, True)):
        response = await frontend.post(f"/v1/{path}", {"model": MODEL, "stream": stream, **prompt, **body})
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error["param"] == field, error
        assert message in error["message"]
    assert not frontend.fake.submits


def deep_chain(depth: int) -> dict[str, Any]:
    """A schema whose compilation is as deep as its chain of references."""
    links: dict[str, Any] = {
        f"d{place}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{place + 1}"}}}
        for place in range(depth)
    }
    return {"$defs": {**links, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("constraint", [{"json": deep_chain(3500)}, {"regex": "(a?)" * 60_000}])
async def test_a_constraint_that_breaks_its_compiler_breaks_nothing_else(
    frontend: Running, constraint: dict[str, Any]
) -> None:
    good = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "structured_outputs": {"regex": "[0-9]+"}}
    assert (await frontend.post("/v1/completions", good)).status_code == 200  # it runs
    bad = {"model": MODEL, "prompt": "Hi", "structured_outputs": constraint}
    response = await frontend.post("/v1/completions", bad, timeout=240)
    assert response.status_code == 400, response.text
    assert "too complex" in response.json()["error"]["message"]
    fresh = {**good, "structured_outputs": {"regex": "[0-9]+x"}}
    assert (await frontend.post("/v1/completions", fresh, timeout=240)).status_code == 200


async def test_what_was_refused_is_remembered_by_its_digest(frontend: Running) -> None:
    bad = {"model": MODEL, "prompt": "Hi", "structured_outputs": {"regex": "(a?)" * 60_000}}
    first = await frontend.post("/v1/completions", bad, timeout=240)
    grammars = frontend.server.serving.model.grammars
    assert all(len(key) == 20 for key in grammars._known), "not by its 240 KB"
    grammars.helpers.command = ["/bin/false"]
    second = await frontend.post("/v1/completions", bad, timeout=240)
    assert (first.status_code, second.status_code) == (400, 400)
    assert "too complex" in second.json()["error"]["message"]


async def test_equal_constraints_are_compiled_once_and_in_turn(frontend: Running) -> None:
    bodies = [
        {"model": MODEL, "prompt": "Hi", "structured_outputs": {"regex": f"[a-z]{{{k % 4 + 1}}}"}} for k in range(40)
    ]
    responses = await asyncio.gather(*(frontend.post("/v1/completions", {"max_tokens": 1, **body}) for body in bodies))
    assert {response.status_code for response in responses} == {200}


async def test_over_grpc(frontend: Running) -> None:
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    constraint = types_pb2.StructuredOutput(choice=types_pb2.StringChoices(texts=["a", "b"]))
    params = types_pb2.SamplingParams(max_tokens=2, structured_output=constraint)
    await stub.GenerateUnary(inference_pb2.GenerateRequest(text="Hi", sampling_params=params))
    assert submitted(frontend) == StructuredOutputsParams(choice=["a", "b"])
    for bad in (types_pb2.StructuredOutput(regex="("), types_pb2.StructuredOutput()):
        params = types_pb2.SamplingParams(max_tokens=2, structured_output=bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(inference_pb2.GenerateRequest(text="Hi", sampling_params=params))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
