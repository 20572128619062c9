"""A VllmEngine request becomes the one that does the same here, field by field."""

from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto import vllm_engine_pb2

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.errors import InvalidRequest
from pagoda_scheduler.vllm_engine.requests import submit_from_vllm


def asked(ids: tuple[int, ...] = (5, 70_000), **params: Any) -> vllm_engine_pb2.GenerateRequest:
    request = vllm_engine_pb2.GenerateRequest(request_id="r")
    request.tokenized.input_ids.extend(ids)
    request.sampling_params.MergeFrom(vllm_engine_pb2.SamplingParams(**params))
    return request


def sampling(**params: Any) -> types_pb2.SamplingParams:
    return submit_from_vllm(asked(**params)).sampling_params


def test_ids_and_tokens() -> None:
    assert submit_from_vllm(asked()) == scheduler_pb2.SubmitRequest(
        request_id="r", prompt_token_ids=token_ids_to_bytes([5, 70_000]), sampling_params=types_pb2.SamplingParams(n=1)
    )


def test_every_number() -> None:
    given: dict[str, Any] = {
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "seed": 11,
    }
    made = sampling(**given, logit_bias={5: 1.5})
    for name, value in given.items():
        shown = getattr(made, name)
        assert (list(shown) if isinstance(value, list) else shown) == value, name
    assert dict(made.logit_bias) == {5: 1.5}


def test_zeros_that_mean_nothing_and_zeros_that_do() -> None:
    made = sampling(temperature=0.0, top_p=0.0, repetition_penalty=0.0)
    assert made.HasField("temperature")
    assert not made.HasField("top_p")
    assert not made.HasField("repetition_penalty")
    assert sampling(seed=-1).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"json_schema": '{"type": "null"}'}, {"json_schema": '{"type": "null"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        (
            {"choice": vllm_engine_pb2.ChoiceConstraint(choices=["a", "b"])},
            {"choice": types_pb2.StringChoices(texts=["a", "b"])},
        ),
    ],
)
def test_constraints(given: dict[str, Any], made: dict[str, Any]) -> None:
    assert sampling(**given).structured_output == types_pb2.StructuredOutput(**made)
    assert not sampling().HasField("structured_output")
    assert not sampling(json_object=False).HasField("structured_output")


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="input must be token ids") as caught:
        submit_from_vllm(asked(()))
    assert caught.value.field == "input"
    with pytest.raises(
        InvalidRequest, match="truncate_prompt_tokens is not supported here: send fewer tokens"
    ) as caught:
        sampling(truncate_prompt_tokens=0)
    assert caught.value.field == "truncate_prompt_tokens"
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        request = asked()
        if isinstance(getattr(request, name), str):
            setattr(request, name, "")
        else:
            getattr(request, name).SetInParent()
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported$") as caught:
            submit_from_vllm(request)
        assert caught.value.field == name
