"""`pagoda serve` of encoders: every endpoint for vectors, labels and scores gives what transformers gives."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from pagoda import LLM
from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.encoders import CLS, SEP, hidden_of, make_encoder, write_modules
from tests.process.stack import Stack

TEXTS = ["a dog runs", "x", "the cat sleeps on the mat", "y" * 500]
QUERY = "who runs?"


@dataclass
class Served:
    """A stack and what it serves."""

    stack: Stack
    model: Any

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = httpx.post(f"{self.stack.url}{path}", json=body, timeout=240)
        assert answer.status_code == status, answer.text
        return answer.json()


def serve(directory: Path, *flags: str) -> Stack:
    stack = Stack(str(directory), "--served-model-name=tiny", "--dtype=float32", *flags)
    stack.wait_ready()
    return stack


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("embedder")
    model = make_encoder("BertModel", directory, is_matryoshka=True)
    prompts = {"prompts": {"query": "Q: ", "document": "D: "}, "similarity_fn_name": "dot"}
    write_modules(directory, "mean_tokens", config_sentence_transformers=prompts)
    stack = serve(directory)
    yield Served(stack, model)
    stack.end()


@pytest.fixture(scope="module")
def tokens_embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """ColBERT: no pooling; and pieces of long texts."""
    directory = tmp_path_factory.mktemp("tokens")
    model = make_encoder("BertModel", directory)
    write_modules(directory, None, normalizes=False)
    stack = serve(directory, "--enable-long-inputs")
    yield Served(stack, model)
    stack.end()


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("ranker")
    model = make_encoder("BertForSequenceClassification", directory, num_labels=1)
    stack = serve(directory)
    yield Served(stack, model)
    stack.end()


@pytest.fixture(scope="module")
def labeller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("labeller")
    names = {0: "good", 1: "bad", 2: "neither"}
    model = make_encoder("ModernBertForSequenceClassification", directory, num_labels=3, id2label=names)
    stack = serve(directory)
    yield Served(stack, model)
    stack.end()


def ids_of(text: str) -> list[int]:
    """As the tokenizer of bytes writes ASCII."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [CLS, *(alphabet.index("Ġ" if one == " " else one) for one in text), SEP]


def vector_of(model: Any, text: str) -> np.ndarray:
    mean = hidden_of(model, ids_of(text)).mean(0)
    return np.asarray(mean / mean.norm())


@torch.inference_mode()
def score_of(model: Any, query: str, text: str) -> float:
    first, second = ids_of(query), ids_of(text)[1:]
    ids, types = torch.tensor([first + second]), torch.tensor([[0] * len(first) + [1] * len(second)])
    return float(model(input_ids=ids, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits.sigmoid())


def close(made: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(made, dtype=np.float64), np.asarray(wanted), rtol=1e-3, atol=1e-4)


def test_embeddings_as_texts_ids_and_base64(embedder: Served) -> None:
    wanted = [vector_of(embedder.model, text) for text in TEXTS]
    answer = embedder.post("/v1/embeddings", model="tiny", input=TEXTS)
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in TEXTS)
    close([one["embedding"] for one in answer["data"]], wanted)
    answer = embedder.post("/v1/embeddings", input=[ids_of(text) for text in TEXTS], encoding_format="base64")
    close([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]], wanted)
    short = embedder.post("/v1/embeddings", input=TEXTS[0], dimensions=16)["data"][0]["embedding"]
    close(short, wanted[0][:16] / np.linalg.norm(wanted[0][:16]))


def test_prompts_of_the_files(embedder: Served) -> None:
    answer = embedder.post("/v1/embeddings", input=TEXTS[0], prompt_name="query")
    close(answer["data"][0]["embedding"], vector_of(embedder.model, "Q: " + TEXTS[0]))
    told = embedder.post("/v1/embeddings", 400, input=TEXTS[0], prompt_name="quest")["error"]["message"]
    assert "prompt_name is 'quest', must be one of the model's prompts: query, document" in told


def test_what_is_too_long_is_refused_with_both_numbers_or_cut(embedder: Served) -> None:
    told = embedder.post("/v1/embeddings", 400, input="z" * 600)["error"]["message"]
    assert "maximum context length is 514 tokens, but an input has 602 tokens" in told
    cut = embedder.post("/v1/embeddings", input="z" * 600, truncate_prompt_tokens=100)
    assert cut["usage"]["prompt_tokens"] == 100
    close(cut["data"][0]["embedding"], vector_of(embedder.model, "z" * 98))


def test_pooling_gives_vectors_of_tokens(embedder: Served) -> None:
    answer = embedder.post("/pooling", input=TEXTS[:2], task="token_embed", normalize=False)
    for one, text in zip(answer["data"], TEXTS, strict=False):
        close(one["data"], hidden_of(embedder.model, ids_of(text)))
    told = embedder.post("/pooling", 400, input="a", task="classify")["error"]["message"]
    assert told == (
        "Unsupported task: 'classify'. Classification API is not supported by this model: it can embed, token_embed."
    )
    assert "input is missing" in embedder.post("/pooling", 400, model="tiny")["error"]["message"]


def test_scores_by_vectors(embedder: Served) -> None:
    query = vector_of(embedder.model, QUERY)
    answer = embedder.post("/score", text_1=QUERY, text_2=TEXTS)
    close([one["score"] for one in answer["data"]], [float(query @ vector_of(embedder.model, text)) for text in TEXTS])


def test_cohere_embeds(embedder: Served) -> None:
    answer = embedder.post(
        "/v2/embed", texts=TEXTS[:2], input_type="search_query", embedding_types=["float", "int8", "ubinary"]
    )
    vectors = np.array([vector_of(embedder.model, "Q: " + text) for text in TEXTS[:2]])
    close(answer["embeddings"]["float"], vectors)
    assert np.abs(np.array(answer["embeddings"]["int8"]) - vectors * 127).max() <= 0.6
    assert answer["embeddings"]["ubinary"] == np.packbits(vectors > 0, axis=1).tolist()
    assert answer["meta"]["api_version"] == {"version": "2"}


def test_many_inputs_at_once(embedder: Served) -> None:
    texts = [f"text {number}" for number in range(2048)]
    answer = embedder.post("/v1/embeddings", input=texts, encoding_format="base64")
    assert len(answer["data"]) == 2048
    for place in (0, 1000, 2047):
        made = np.frombuffer(base64.b64decode(answer["data"][place]["embedding"]), "<f4")
        close(made, vector_of(embedder.model, texts[place]))
    told = embedder.post("/v1/embeddings", 400, input=["a"] * 2049)["error"]["message"]
    assert "at most 2048 inputs, got 2049" in told


def test_no_text_is_made(embedder: Served) -> None:
    told = embedder.post("/v1/completions", 400, prompt="a", model="tiny")["error"]["message"]
    assert told == "the model does not generate text: it can embed, token_embed"


def test_vectors_of_tokens_meet_late(tokens_embedder: Served) -> None:
    def vectors(text: str) -> Any:
        return torch.nn.functional.normalize(hidden_of(tokens_embedder.model, ids_of(text)), dim=-1)

    wanted = [float((vectors(QUERY) @ vectors(text).T).amax(1).sum()) for text in TEXTS]
    answer = tokens_embedder.post("/rerank", query=QUERY, documents=TEXTS)
    assert [one["index"] for one in answer["results"]] == sorted(range(4), key=lambda place: -wanted[place])
    close([one["relevance_score"] for one in answer["results"]], sorted(wanted, reverse=True))


def test_a_long_text_is_the_mean_of_its_pieces_and_the_answer_says_so(tokens_embedder: Served) -> None:
    text = "z" * 600
    answer = tokens_embedder.post("/v1/embeddings", input=["short", text])
    assert "num_pieces" not in answer["data"][0]
    assert answer["data"][1]["num_pieces"] == 2
    assert answer["usage"]["prompt_tokens"] == len("short") + 2 + 600 + 4
    parts = [hidden_of(tokens_embedder.model, ids_of("z" * count))[0] for count in (512, 88)]
    parts = [part / part.norm() for part in parts]
    mean = (parts[0] * 514 + parts[1] * 90) / 604
    close(answer["data"][1]["embedding"], mean / mean.norm())


def test_library_http_and_grpc_make_the_same_prompts(tmp_path: Path) -> None:
    """The default prompt of the files, long texts in pieces, documents that are cut, by one function."""
    make_encoder("BertModel", tmp_path)
    prompts = {"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": "document"}
    write_modules(tmp_path, "mean_tokens", config_sentence_transformers=prompts)
    texts = ["a dog runs", "z" * 1200]
    pieces = {"enable_chunked_processing": True}
    with LLM(str(tmp_path), dtype="float32", pooler_config=pieces) as llm:
        made = llm.embed(texts, use_tqdm=False)
        queries = llm.embed(texts, use_tqdm=False, prompt_name="query")
        cut = llm.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 40})
        alike = llm.score("who runs?", texts[0], use_tqdm=False)
    assert [one.num_pieces for one in made] == [1, 3]
    stack = serve(tmp_path, "--pooler-config.enable_chunked_processing", "true")
    try:
        served = Served(stack, None)
        answer = served.post("/v1/embeddings", input=texts)
        assert [one.get("num_pieces", 1) for one in answer["data"]] == [1, 3]
        assert answer["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in made)
        close([one["embedding"] for one in answer["data"]], [one.outputs.embedding for one in made])
        answer = served.post("/v2/embed", texts=texts, input_type="search_query", truncate="NONE")
        close(answer["embeddings"]["float"], [one.outputs.embedding for one in queries])
        answer = served.post("/pooling", input=texts, task="embed", truncate_prompt_tokens=40)
        close([one["data"] for one in answer["data"]], [one.outputs.embedding for one in cut])
        answer = served.post("/score", text_1="who runs?", text_2=texts[0])
        close(answer["data"][0]["score"], alike[0].outputs.score)
        stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}"))
        inputs = [inference_pb2.EmbedInput(text=text) for text in texts]
        found = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, prompt_name="query"))
        assert [one.num_pieces for one in found.embeddings] == [0, 3]
        close([one.values for one in found.embeddings], [one.outputs.embedding for one in queries])
        found = stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, truncate_prompt_tokens=40))
        close([one.values for one in found.embeddings], [one.outputs.embedding for one in cut])
    finally:
        stack.end()


def test_embeddings_of_conversations_as_bytes_and_as_sagemaker_asks(embedder: Served) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    said = {"messages": [{"role": "user", "content": "a dog runs"}], "chat_template": template}
    told = embedder.post("/v1/embeddings", 400, **said)["error"]["message"]
    assert "trust_request_chat_template" in told.replace("-", "_")
    response = httpx.post(
        f"{embedder.stack.url}/v1/embeddings",
        json={"input": TEXTS[:2], "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"},
        timeout=240,
    )
    places = json.loads(response.headers["metadata"])["data"]
    made = [np.frombuffer(response.content[one["start"] : one["end"]], ">f2") for one in places]
    np.testing.assert_allclose(np.array(made), [vector_of(embedder.model, text) for text in TEXTS[:2]], atol=2e-3)
    answer = embedder.post("/invocations", model="tiny", input=TEXTS[0])
    close(answer["data"][0]["embedding"], vector_of(embedder.model, TEXTS[0]))
    answer = embedder.post("/invocations", model="tiny", query=QUERY, documents=TEXTS[:2])
    assert len(answer["results"]) == 2
    told = embedder.post("/pooling", 400, input="a", task="plugin")["error"]["message"]
    assert told.startswith("No IOProcessor plugin installed.")
    told = embedder.post("/v2/embed", 400, texts=["a"], input_type="poem")["error"]["message"]
    assert told.startswith("Unsupported input_type 'poem'. Supported values: query, document")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(ranker: Served, path: str) -> None:
    answer = ranker.post(path, text_1=QUERY, text_2=TEXTS)
    close([one["score"] for one in answer["data"]], [score_of(ranker.model, QUERY, text) for text in TEXTS])
    pairs = ranker.post(path, queries=TEXTS[:2], documents=TEXTS[1:3])
    close(pairs["data"][1]["score"], score_of(ranker.model, TEXTS[1], TEXTS[2]))
    told = ranker.post(path, 400, text_1=["a", "b"], text_2=["c"])["error"]["message"]
    assert "text_1 has 2 texts, must have 1 or as many as text_2, 1" in told
    cut = ranker.post(path, text_1=QUERY, text_2="y" * 900, truncate_prompt_tokens=200)
    close(cut["data"][0]["score"], score_of(ranker.model, QUERY, "y" * (200 - 3 - len(QUERY))))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(ranker: Served, path: str) -> None:
    scores = [score_of(ranker.model, QUERY, text) for text in TEXTS]
    answer = ranker.post(path, model="tiny", query=QUERY, documents=[*TEXTS[:3], {"text": TEXTS[3]}], top_n=3)
    order = sorted(range(4), key=lambda place: -scores[place])[:3]
    assert [one["index"] for one in answer["results"]] == order
    assert answer["results"][0]["document"]["text"] == TEXTS[order[0]]
    close([one["relevance_score"] for one in answer["results"]], [scores[place] for place in order])
    whole = ranker.post(path, query=QUERY, documents=[TEXTS[3]])
    part = ranker.post(path, query=QUERY, documents=[TEXTS[3]], max_tokens_per_doc=7)
    assert whole["usage"]["prompt_tokens"] - part["usage"]["prompt_tokens"] == len(TEXTS[3]) - 7
    told = ranker.post(path, 400, query="a", documents=["b"], max_tokens_per_doc=-5)["error"]["message"]
    assert "max_tokens_per_doc must be a non-negative integer" in told
    assert (
        "top_n must be at least 0" in ranker.post(path, 400, query="a", documents=["b"], top_n=-1)["error"]["message"]
    )


def test_a_ranker_does_not_embed(ranker: Served) -> None:
    told = ranker.post("/v1/embeddings", 404, input="a")["error"]["message"]
    assert told == (
        "Unsupported task: 'embed'. Embedding API is not supported by this model: it can classify, score, "
        "token_classify."
    )


def test_the_same_over_grpc(ranker: Served, labeller: Served, embedder: Served) -> None:
    def stub(served: Served) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(grpc.insecure_channel(f"127.0.0.1:{served.stack.grpc_port}"))

    inputs = [inference_pb2.EmbedInput(text=text) for text in TEXTS]
    vectors = stub(embedder).Embed(inference_pb2.EmbedRequest(inputs=inputs)).embeddings
    close([one.values for one in vectors], [vector_of(embedder.model, text) for text in TEXTS])
    params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_TOKEN_EMBED, normalize=False)
    pooled = stub(embedder).Pool(inference_pb2.PoolRequest(inputs=inputs, pooling=params)).texts
    for one, text in zip(pooled, TEXTS, strict=True):
        close(np.array(one.values).reshape(one.num_rows, -1), hidden_of(embedder.model, ids_of(text)))
    wanted = [score_of(ranker.model, QUERY, text) for text in TEXTS]
    answer = stub(ranker).Score(inference_pb2.ScoreRequest(queries=[QUERY], documents=TEXTS))
    close(answer.scores, wanted)
    assert answer.usage.num_prompt_tokens == sum(len(ids_of(QUERY)) + len(ids_of(text)) - 1 for text in TEXTS)
    found = stub(ranker).Rerank(inference_pb2.RerankRequest(query=QUERY, documents=TEXTS, top_n=2)).results
    assert [one.index for one in found] == sorted(range(4), key=lambda place: -wanted[place])[:2]
    labels = stub(labeller).Classify(inference_pb2.ClassifyRequest(inputs=inputs)).texts
    assert {one.label for one in labels} <= {"good", "bad", "neither"}
    assert all(abs(sum(one.probabilities) - 1) < 1e-3 for one in labels)
    with pytest.raises(grpc.RpcError) as caught:
        stub(ranker).Embed(inference_pb2.EmbedRequest(inputs=inputs))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Unsupported task: 'embed'" in caught.value.details()


def test_labels(labeller: Served) -> None:
    answer = labeller.post("/classify", input=TEXTS)
    for one, text in zip(answer["data"], TEXTS, strict=True):
        with torch.inference_mode():
            wanted = labeller.model(input_ids=torch.tensor([ids_of(text)])).logits[0].softmax(-1)
        close(one["probs"], wanted)
        assert one["label"] == ["good", "bad", "neither"][int(wanted.argmax())]
        assert one["num_classes"] == 3
    raw = labeller.post("/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    assert abs(sum(raw) - 1) > 1e-3
