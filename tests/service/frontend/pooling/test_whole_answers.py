"""Each field of the answers with vectors, labels, scores and ranks over HTTP, and what the engine gets."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from pagoda.v1 import types_pb2
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import Running, running_frontend
from tests.service.frontend.pooling.pooling_engine import (
    CLASSIFY,
    EMBED,
    MAX_MODEL_LEN,
    SCORE,
    TOKEN_CLASSIFY,
    TOKEN_EMBED,
    PoolingEngine,
    sent_pooling,
)

pytestmark = pytest.mark.usefixtures("pinned")


async def asked(running: Running, path: str, **body: Any) -> Any:
    """The answer to a call named r."""
    response = await running.http.post(path, json=body, headers={"X-Request-Id": "r"})
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "r"
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def refused(running: Running, path: str, **body: Any) -> tuple[int, str, str]:
    """Status, field and message of an error."""
    response = await running.post(path, body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def listed(prefix: str, data: list[dict[str, Any]], num_tokens: int, model: str = "tiny") -> dict[str, Any]:
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    head = {"id": f"{prefix}-r", "object": "list", "created": 1000, "model": model}
    return {**head, "data": data, "usage": usage}


def pooled(index: int, data: Any) -> dict[str, Any]:
    return {"index": index, "object": "pooling", "data": data}


async def test_vectors_of_two_inputs() -> None:
    async with running_frontend(PoolingEngine(EMBED, TOKEN_EMBED)) as running:
        answer = await asked(running, "/pooling", input=[[5, 6], [7]], model="alias")
        data = [pooled(0, [2.0, 6.0, 0.0, 0.0]), pooled(1, [1.0, 7.0, 0.0, 0.0])]
        assert answer == listed("pool", data, 3, model="alias")
        assert [submit.tenant for submit in running.fake.submits] == ["", ""]
        assert sent_pooling(running) == [types_pb2.PoolingParams(task=EMBED)] * 2


async def test_what_a_body_says_goes_to_the_engine() -> None:
    async with running_frontend(PoolingEngine(EMBED, has_matryoshka=True)) as running:
        fields = {"normalize": False, "dimensions": 3, "priority": -4, "cache_salt": "s", "timeout": 1000}
        await running.post("/pooling", {"input": [5, 6], **fields}, headers={"x-tenant-id": "one"})
        [submit] = running.fake.submits
        assert submit.pooling == types_pb2.PoolingParams(task=EMBED, normalize=False, dimensions=3)
        assert (submit.priority, submit.cache_salt, submit.tenant) == (-4, "s", "one")
        assert 900 < submit.timeout_s <= 1000
        assert await refused(running, "/pooling", input=[5], cache_salt="a/b") == (
            400,
            "cache_salt",
            "cache_salt must not contain any of '@', '/', '\\' and NUL, got '/'",
        )


async def test_values_of_each_token_are_rows_and_base64_is_of_all_of_them() -> None:
    fake = PoolingEngine(TOKEN_EMBED, EMBED)
    fake.made = {6: [1, 2, 3, 4, 5, 6], 7: [1, 2, 3, 4]}
    async with running_frontend(fake) as running:
        answer = await asked(running, "/pooling", input=[[4, 5, 6], [5, 6, 7]])
        # the second leaves out its first token
        assert answer == listed("pool", [pooled(0, [[1, 2], [3, 4], [5, 6]]), pooled(1, [[1, 2], [3, 4]])], 6)
        answer = await asked(running, "/pooling", input=[4, 5, 6], encoding_format="base64", model="tiny")
        written = base64.b64encode(np.arange(1, 7, dtype="<f4").tobytes()).decode()
        assert answer == listed("pool", [pooled(0, written)], 3)
        assert {one.task for one in sent_pooling(running)} == {TOKEN_EMBED}


@pytest.mark.parametrize(
    ("task", "number", "data"),
    [
        ("embed", EMBED, [1.0, 2.0, 3.0, 4.0]),
        ("token_embed", TOKEN_EMBED, [[1.0, 2.0], [3.0, 4.0]]),
        ("token_classify", TOKEN_CLASSIFY, [[1.0, 2.0], [3.0, 4.0]]),
        ("classify", CLASSIFY, [1.0, 2.0, 3.0, 4.0]),
    ],
)
async def test_the_task_that_is_asked_for(task: str, number: types_pb2.PoolingTask, data: Any) -> None:
    fake = PoolingEngine(SCORE, EMBED, TOKEN_EMBED, CLASSIFY, TOKEN_CLASSIFY, labels=["a", "b"])
    fake.made = {6: [1, 2, 3, 4]}
    async with running_frontend(fake) as running:
        answer = await asked(running, "/pooling", input=[5, 6], task=task)
        assert (answer["data"], sent_pooling(running)[0].task) == ([pooled(0, data)], number)
        assert await refused(running, "/pooling", input=[5], task="sparse") == (
            400,
            "task",
            "Unsupported task: 'sparse'. It is not supported by this model: it can score, embed, token_embed, "
            "classify, token_classify.",
        )


async def test_lexical_weights_are_one_number_a_token() -> None:
    fake = PoolingEngine(EMBED, TOKEN_CLASSIFY)
    fake.made = {6: [0.0, 0.5, 2.0]}
    async with running_frontend(fake) as running:
        answer = await asked(running, "/pooling", input=[4, 5, 6], task="token_classify")
        assert answer["data"] == [pooled(0, [0.0, 0.5, 2.0])]


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/embeddings", {"input": "a"}, "Unsupported task: 'embed'. Embedding API is not supported"),
        ("/v2/embed", {"texts": ["a"]}, "Unsupported task: 'embed'. Embedding API is not supported"),
        ("/score", {"text_1": "a", "text_2": "b"}, "Scoring API is only enabled for num_labels == 1"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, "Scoring API is only enabled for num_labels == 1"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "Scoring API is only enabled for num_labels == 1"),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, "Scoring API is only enabled for num_labels == 1"),
    ],
)
async def test_a_path_for_other_models_is_not_there_and_says_why(path: str, body: dict[str, Any], why: str) -> None:
    async with running_frontend(PoolingEngine(CLASSIFY, TOKEN_CLASSIFY, labels=["a", "b"])) as running:
        response = await running.post(path, body)
        answer = response.json()
        assert (response.status_code, answer["detail"], answer["error"]["type"]) == (404, "Not Found", "NotFoundError")
        assert why in answer["error"]["message"]
        assert "it can classify, token_classify." in answer["error"]["message"]


async def test_a_task_that_the_pooler_config_leaves_out_is_named() -> None:
    async with running_frontend(PoolingEngine(TOKEN_EMBED, unserved_pooling_tasks=[EMBED])) as running:
        assert await refused(running, "/pooling", input=[5], task="embed") == (
            400,
            "task",
            'Try switching the model\'s pooling_task via --pooler-config \'{"task": "embed"}\': now it can '
            "token_embed.",
        )
        response = await running.post("/classify", {"input": [5]})
        assert response.status_code == 404
        assert response.json()["detail"] == "Not Found"


async def test_labels_have_their_names_and_number() -> None:
    fake = PoolingEngine(CLASSIFY, labels=["good", "bad"])
    fake.made = {6: [0.25, 0.75], 7: [0.5, 0.25, 0.125]}
    async with running_frontend(fake) as running:
        answer = await asked(running, "/classify", input=[[5, 6], [7]], use_activation=False)
        data = [
            {"index": 0, "label": "bad", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "good", "probs": [0.5, 0.25, 0.125], "num_classes": 3},
        ]
        assert answer == listed("classify", data, 3)
        assert sent_pooling(running)[0] == types_pb2.PoolingParams(task=CLASSIFY, use_activation=False, normalize=False)
        fake.made = {6: [0.0, 0.0, 1.0]}  # a label without a name
        assert (await asked(running, "/classify", input=[6]))["data"][0]["label"] == "LABEL_2"


async def test_scores_of_a_model_that_scores() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    fake = PoolingEngine(SCORE)
    ends = [tokenizer.encode(text)[-1] for text in ("one", "two")]
    fake.made = {ends[0]: [0.25], ends[1]: [0.5]}
    async with running_frontend(fake) as running:
        answer = await asked(running, "/score", text_1="q", text_2=["one", "two"], use_activation=False)
        num_tokens = sum(len(submit.prompt_token_ids) // 4 for submit in fake.submits)
        data = [
            {"index": 0, "object": "score", "score": 0.25},
            {"index": 1, "object": "score", "score": 0.5},
        ]
        assert answer == listed("score", data, num_tokens)
        assert [(one.task, one.use_activation) for one in sent_pooling(running)] == [(SCORE, False)] * 2
        pairs = await asked(running, "/score", text_1=["a", "b"], text_2=["two", "one"])
        assert [one["score"] for one in pairs["data"]] == [0.5, 0.25]
        assert len(fake.submits) == 4


async def test_ranks_are_by_score_and_show_documents_unless_told_not_to() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    fake = PoolingEngine(SCORE)
    texts = ["one", "two", "four"]
    for text, score in zip(texts, (0.25, 0.75, 0.5), strict=True):
        fake.made[tokenizer.encode(text)[-1]] = [score]
    async with running_frontend(fake) as running:
        answer = await asked(running, "/rerank", query="q", documents=["one", {"text": "two"}, "four"])
        num_tokens = sum(len(submit.prompt_token_ids) // 4 for submit in fake.submits)
        results = [
            {"index": 1, "document": {"text": "two"}, "relevance_score": 0.75},
            {"index": 2, "document": {"text": "four"}, "relevance_score": 0.5},
            {"index": 0, "document": {"text": "one"}, "relevance_score": 0.25},
        ]
        whole = {
            "id": "rerank-r",
            "model": "tiny",
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": results,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
        assert answer == whole
        for top_n, shown in ((0, 3), (1, 1), (2, 2), (3, 3), (9, 3)):
            answer = await asked(running, "/rerank", query="q", documents=texts, top_n=top_n, model="alias")
            assert answer == {**whole, "model": "alias", "results": results[:shown]}, top_n
        answer = await asked(running, "/rerank", query="q", documents=texts, return_documents=False)
        bare = [{name: one[name] for name in ("index", "relevance_score")} for one in results]
        assert answer == {**whole, "results": bare}
        assert (await refused(running, "/rerank", query="q", documents=texts, top_n=-1))[1:] == (
            "top_n",
            "top_n must be at least 0, got -1",
        )
        assert (await refused(running, "/rerank", query="q", documents=[]))[1:] == (
            "documents",
            "documents is empty: it must have at least one text",
        )


async def test_a_document_is_cut_by_either_name() -> None:
    async with running_frontend(PoolingEngine(SCORE)) as running:
        texts = {"query": "q", "documents": ["some words of a document"]}
        for fields, kept in (
            ({"max_tokens_per_doc": 5}, 6),  # the query is not cut
            ({"max_tokens_per_query": 5, "max_tokens_per_doc": 2}, 3),
            ({"max_tokens_per_doc": 0, "truncate_prompt_tokens": 4}, 4),
            ({"truncate_prompt_tokens": 4}, 4),
            ({"truncate_prompt_tokens": 4, "max_tokens_per_doc": 5}, 4),
        ):
            await asked(running, "/rerank", **texts, **fields)
            assert len(running.fake.submits[-1].prompt_token_ids) == 4 * kept, fields


@pytest.mark.parametrize("task", [EMBED, SCORE])
async def test_queries_and_documents_are_cut_whatever_the_model_makes_of_them(task: types_pb2.PoolingTask) -> None:
    fake = PoolingEngine(task)
    async with running_frontend(fake) as running:
        given = {"text_1": "some words of a query", "text_2": ["some words of a document"]}
        await running.post("/score", given | {"max_tokens_per_query": 2, "max_tokens_per_doc": 3})
        lengths = [len(submit.prompt_token_ids) // 4 for submit in fake.submits]
        assert lengths == ([2, 3] if task == EMBED else [5])
        for field in ("max_tokens_per_query", "max_tokens_per_doc"):
            for path, body in (("/score", given), ("/rerank", {"query": "q", "documents": ["d"]})):
                told = f"{field} must be a non-negative integer, got -5"
                assert await refused(running, path, **body, **{field: -5}) == (400, field, told)


async def test_scores_by_vectors_make_each_text_once() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    vectors = {"the": [3.0, 4.0], "other": [4.0, 3.0], "and": [-3.0, -4.0]}  # a token each
    for task, scores in ((EMBED, [1.0, 0.96, -1.0]), (TOKEN_EMBED, [25.0, 24.0, -25.0])):
        fake = PoolingEngine(task)
        fake.made = {tokenizer.encode(text)[-1]: values for text, values in vectors.items()}
        async with running_frontend(fake) as running:
            answer = await asked(running, "/score", text_1="the", text_2=list(vectors))
            num_tokens = sum(len(submit.prompt_token_ids) // 4 for submit in fake.submits)
            made = [one.pop("score") for one in answer["data"]]
            assert made == pytest.approx(scores), task
            assert answer == listed("score", [{"index": i, "object": "score"} for i in range(3)], num_tokens)
            assert len(fake.submits) == 3, "the query is one of the documents"
            assert {one.task for one in sent_pooling(running)} == {task}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"text_2": ["a"]}, "text_1", "text_1 is missing: it must have at least one text"),
        ({"text_1": ["a"]}, "text_2", "text_2 is missing: it must have at least one text"),
        ({"text_1": [], "text_2": ["a"]}, "text_1", "text_1 is empty: it must have at least one text"),
        ({"text_1": ["a"], "text_2": []}, "text_2", "text_2 is empty: it must have at least one text"),
        (
            {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
            "text_1",
            "text_1 has 2 texts, must have 1 or as many as text_2, 3",
        ),
        (
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "text_1",
            "text_1 has 2 texts, must have 1 or as many as text_2, 1",
        ),
    ],
)
async def test_pairs_that_do_not_fit(body: dict[str, Any], field: str, message: str) -> None:
    async with running_frontend(PoolingEngine(SCORE)) as running:
        assert await refused(running, "/score", **body) == (400, field, message)
        assert not running.fake.submits


async def test_cohere_s_answer_and_its_types() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    vector = [1.0, -1.0, 0.5, 0.0, 0.25, 0.125, -0.5, -0.25, 0.75]
    fake = PoolingEngine(EMBED)
    fake.made = {tokenizer.encode("one")[-1]: vector}
    async with running_frontend(fake) as running:
        types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
        answer = await asked(running, "/v2/embed", texts=["one"], embedding_types=types, input_type="search_query")
        num_tokens = len(tokenizer.encode("one", add_special_tokens=True))
        bits = [0b10101100, 0b10000000]
        assert answer == {
            "id": "embd-r",
            "embeddings": {
                "float": [vector],
                "int8": [[127, -127, 64, 0, 32, 16, -64, -32, 95]],
                "uint8": [[255, 1, 192, 128, 160, 144, 64, 96, 223]],
                "binary": [[bits[0] - 128, bits[1] - 128]],
                "ubinary": [bits],
                "base64": [base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()],
            },
            "texts": ["one"],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens, "image_tokens": 0}},
        }
        parts = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        answer = await asked(running, "/v2/embed", inputs=parts)
        assert (answer["texts"], list(answer["embeddings"])) == (["a\nb"], ["float"])


@pytest.mark.parametrize(
    ("fields", "kept", "keeps_end"),
    [
        ({}, MAX_MODEL_LEN, False),
        ({"truncate": "END"}, MAX_MODEL_LEN, False),
        ({"truncate": "START"}, MAX_MODEL_LEN, True),
        ({"truncate": "START", "max_tokens": 4}, 4, True),
        ({"max_tokens": 4}, 4, False),
        ({"max_tokens": 1000}, MAX_MODEL_LEN, False),
        ({"truncate": "NONE", "max_tokens": 4}, 4, False),
    ],
)
async def test_cohere_s_texts_are_cut(fields: dict[str, Any], kept: int, keeps_end: bool) -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    text = " ".join(f"word{number}" for number in range(400))
    whole = tokenizer.encode(text, add_special_tokens=True)
    async with running_frontend(PoolingEngine(EMBED)) as running:
        await asked(running, "/v2/embed", texts=[text], **fields)
        ids = np.frombuffer(running.fake.submits[-1].prompt_token_ids, "<u4").tolist()
        assert len(ids) == kept
        assert ids == (whole[-kept:] if keeps_end else whole[:kept])
        status, field, message = await refused(running, "/v2/embed", texts=[text], truncate="NONE")
        assert (status, field) == (400, "texts")
        assert f"maximum context length is {MAX_MODEL_LEN}" in message


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/v2/embed", {}, "texts", "there must be either texts or inputs"),
        ("/v2/embed", {"texts": ["a"], "inputs": [{"content": []}]}, "texts", "there must be either texts or inputs"),
        (
            "/v2/embed",
            {"inputs": [{"content": [{"image": "x"}]}]},
            "inputs",
            "inputs.0.content has a part that is not text",
        ),
        ("/pooling", {}, "input", "input is missing: it must be a text, token ids or a list of these"),
        (
            "/pooling",
            {"input": "a", "messages": [{"role": "user", "content": "b"}]},
            "messages",
            "there may be either input or messages, got both",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1},
            "max_tokens_per_doc",
            "max_tokens_per_doc must be a non-negative integer, got -1",
        ),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n must be at least 0, got -1"),
        ("/pooling", {"input": []}, "input", "input is empty: it must have at least one entry"),
        ("/pooling", {"input": [[5], [99999]]}, "input", None),
        ("/pooling", {"input": "a", "prompt_name": "x"}, "prompt_name", None),
        ("/pooling", {"input": "a", "dimensions": 3}, "dimensions", None),
        ("/pooling", {"input": [[5]] * 2049}, "input", "there may be at most 2048 inputs, got 2049"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], field: str, message: str | None) -> None:
    async with running_frontend(PoolingEngine(EMBED)) as running:
        status, named, told = await refused(running, path, **body)
        assert (status, named) == (400, field)
        assert message in (None, told)
        assert not running.fake.submits


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_values_as_bytes_with_their_places_or_alone(path: str) -> None:
    async with running_frontend(PoolingEngine(EMBED)) as running:
        body = {"input": [[5, 6], [7]], "embed_dtype": "float16", "endianness": "big"}
        for encoding_format in ("bytes", "bytes_only"):
            response = await running.http.post(
                path, json={**body, "encoding_format": encoding_format}, headers={"X-Request-Id": "r"}
            )
            assert (response.status_code, response.headers["x-request-id"]) == (200, "r")
            assert np.frombuffer(response.content, ">f2").tolist() == [2.0, 6.0, 0.0, 0.0, 1.0, 7.0, 0.0, 0.0]
            metadata = json.loads(response.headers.get("metadata", "null"))
            if encoding_format == "bytes_only":
                assert metadata is None
                continue
            assert [(one["start"], one["end"], one["embed_dtype"], one["endianness"]) for one in metadata["data"]] == [
                (0, 8, "float16", "big"),
                (8, 16, "float16", "big"),
            ]
            assert (metadata["model"], metadata["created"], metadata["usage"]["prompt_tokens"]) == ("tiny", 1000, 3)


async def test_a_conversation_is_one_input_as_the_template_writes_it() -> None:
    async with running_frontend(PoolingEngine(EMBED)) as running:
        for fields, ending in (({}, []), ({"add_generation_prompt": True}, [1, 292, 312, 298, 202])):
            answer = await asked(running, "/pooling", messages=[{"role": "user", "content": "hello"}], **fields)
            ids = np.frombuffer(running.fake.submits[-1].prompt_token_ids, "<u4").tolist()
            assert ids == [1, 579, 267, 202, 260, 284, 82, 2, 202, *ending]
            assert answer["usage"]["prompt_tokens"] == len(ids)
