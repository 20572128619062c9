"""/v1/embeddings as OpenAI's reference describes it, with vLLM's meaning for a model that generates."""

import base64
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from pagoda_common.config.checkpoint.model_files import resolve_model
from tests.conformance.api import API_KEYS, MAX_MODEL_LEN, MODEL, PROMPT, Api

EMBEDDINGS = "/v1/embeddings"
TEXTS = [PROMPT, "A dog", "The sun was hot, and the river was cold. " * 20, "x"]


@pytest.fixture(scope="module")
def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.http.base_url}/v1", api_key=API_KEYS[0], max_retries=0)


def reference(token_ids: list[int]) -> np.ndarray:
    """transformers' final hidden state of the last token, normalised."""
    model = transformers.AutoModel.from_pretrained(str(resolve_model(MODEL)), dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return np.asarray(state / state.norm())


def test_embeddings_are_those_of_transformers(api: Api, client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    prompts = [api.ok("/tokenize", {"model": MODEL, "prompt": text})["tokens"] for text in TEXTS]
    for place, (one, prompt) in enumerate(zip(answer.data, prompts, strict=True)):
        assert one.index == place
        assert np.abs(np.array(one.embedding) - reference(prompt)).max() < 1e-4
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    as_tokens = client.embeddings.create(model=MODEL, input=prompts)
    for one, other in zip(answer.data, as_tokens.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)


@pytest.mark.parametrize("given", [PROMPT, [PROMPT], [5, 6, 7], [[5, 6, 7]]])
def test_every_form_of_input_and_answer(api: Api, given: Any) -> None:
    answers = {name: api.ok(EMBEDDINGS, {"input": given, "encoding_format": name}) for name in ("float", "base64")}
    for answer in answers.values():
        assert answer["object"] == "list"
        assert answer["model"] == MODEL
        [one] = answer["data"]
        assert (one["object"], one["index"]) == ("embedding", 0)
    as_text = base64.b64decode(answers["base64"]["data"][0]["embedding"])
    as_numbers = answers["float"]["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(as_text, "<f4"), as_numbers, atol=1e-6)
    assert np.linalg.norm(as_numbers) == pytest.approx(1.0, abs=1e-5)


def test_dimensions_are_the_models_own(api: Api) -> None:
    size = len(api.ok(EMBEDDINGS, {"input": "a"})["data"][0]["embedding"])
    assert len(api.ok(EMBEDDINGS, {"input": "a", "dimensions": size})["data"][0]["embedding"]) == size
    api.refused(EMBEDDINGS, {"input": "a", "dimensions": size // 2}, param="dimensions")


def test_an_input_may_fill_the_context(api: Api) -> None:
    assert api.ok(EMBEDDINGS, {"input": [5] * MAX_MODEL_LEN})["usage"]["prompt_tokens"] == MAX_MODEL_LEN
    api.refused(EMBEDDINGS, {"input": [5] * (MAX_MODEL_LEN + 1)}, param="input")


@pytest.mark.parametrize("given", [[], "", [""], [[]], ["a", ""], None, 5, [5, "a"], [[5], "a"], [10**6]])
def test_bad_inputs_are_refused(api: Api, given: Any) -> None:
    api.refused(EMBEDDINGS, {"input": given}, param="input")


def test_a_bad_format_is_refused(api: Api) -> None:
    api.refused(EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, param="encoding_format")
