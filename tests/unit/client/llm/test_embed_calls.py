"""LLM's and AsyncLLM's pooling calls in front of an engine of numbers: each task's shape, order, pairs, refusals."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pagoda import LLM, AsyncLLM, PoolingParams
from pagoda.llm import embed_calls
from pagoda.llm.embed_calls import EmbedCalls
from pagoda.llm.embedding import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingInput,
    PoolingOutput,
    PoolingRequestOutput,
    as_embedding,
    by_token,
    pool_input,
    pooling_tasks,
    with_task,
)
from pagoda.v1 import types_pb2
from pagoda_common.engine.convert import POOLING_TASKS
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError, QueueFull
from pagoda_common.params.outputs import EngineOutput
from pagoda_common.params.pooling_params import POOLED, PoolingTask
from pagoda_common.text.pooling_prompts import PoolingPrompt
from pagoda_common.text.tokenizer import Tokenizer

SIZE = 8


class Stream:
    """Gives what the engine makes of the request."""

    def __init__(self, engine: "Engine", request: EngineRequest) -> None:
        self.engine, self.request = engine, request

    async def get(self) -> list[EngineOutput]:
        self.engine.num_open += 1
        self.engine.most_open = max(self.engine.most_open, self.engine.num_open)
        for _ in range(5):
            await asyncio.sleep(0)
        self.engine.num_open -= 1
        output = EngineOutput(index=0, offset=0, token_ids=[], num_cached_tokens=2)
        output.error, output.embedding = self.engine.error, self.engine.make(self.request)
        return [output]

    def abort(self) -> None:
        self.engine.num_aborts += 1

    def drop(self) -> None:
        pass


class Engine:
    """Makes values of each request with `make`."""

    def __init__(self, *tasks: PoolingTask) -> None:
        numbers = [types_pb2.PoolingTask.Value(f"POOLING_TASK_{task.upper()}") for task in tasks]
        self.model_info = types_pb2.ModelInfo(
            vocab_size=3072, max_model_len=100, pooling_tasks=numbers, embedding_size=SIZE if "embed" in tasks else 0
        )
        self.is_sleeping = False
        self.error: PagodaError | None = None
        self.requests: list[EngineRequest] = []
        self.num_open = self.most_open = self.num_aborts = 0
        self.make: Callable[[EngineRequest], Any] = lambda request: vector(*request.prompt_token_ids[:2])

    def submit(self, request: EngineRequest) -> Stream:
        self.requests.append(request)
        return Stream(self, request)


def vector(*values: float) -> Any:
    return np.array(values, np.float32)


class Loop:
    """Runs what it is given at once."""

    def run(self, call: Any) -> Any:
        return asyncio.run(call)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def calls(tokenizer: Tokenizer, *tasks: PoolingTask) -> tuple[EmbedCalls, Engine]:
    engine, llm = Engine(*tasks), AsyncLLM()
    llm._engine, llm._tokenizer = cast("Any", engine), tokenizer
    made = EmbedCalls()
    made._async_llm, made._loop = llm, cast("Any", Loop())
    return made, engine


def test_the_names_of_tasks_are_those_of_messages() -> None:
    for task in ("embed", "token_embed", "classify", "token_classify", "score", "sparse"):
        assert POOLING_TASKS[cast("Any", task)] == types_pb2.PoolingTask.Value(f"POOLING_TASK_{task.upper()}")


def test_embeddings_are_lists_in_the_prompts_order(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    params = PoolingParams(normalize=False, dimensions=2)
    outputs = llm.embed([[5, 6], [7, 8]], pooling_params=params, use_tqdm=False)
    assert [output.outputs for output in outputs] == [EmbeddingOutput([5.0, 6.0]), EmbeddingOutput([7.0, 8.0])]
    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [7, 8]]
    assert {(output.num_cached_tokens, output.num_pieces, output.finished) for output in outputs} == {(2, 1, True)}
    assert outputs[0].outputs.hidden_size == 2
    assert [request.pooling for request in engine.requests] == [with_task(params, "embed")] * 2
    assert [request.sampling_params for request in engine.requests] == [POOLED] * 2
    assert engine.num_aborts == 2


def test_a_task_per_token_comes_as_rows(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "token_embed", "token_classify", "classify")
    engine.model_info.labels.extend(["a", "b"])
    engine.make = lambda request: np.arange(6, dtype=np.float32)
    [output] = llm.encode([5, 6, 7], use_tqdm=False)
    np.testing.assert_array_equal(output.outputs.data, [[0, 1], [2, 3], [4, 5]])
    assert engine.requests[-1].pooling == PoolingParams(task="token_embed"), "the first task is the default"
    [output] = llm.reward([5, 6], use_tqdm=False)
    np.testing.assert_array_equal(output.outputs.data, [[0, 1, 2], [3, 4, 5]])
    assert engine.requests[-1].pooling == PoolingParams(task="token_classify")
    [output] = llm.encode([5, 6, 7], PoolingParams(task="token_classify"), use_tqdm=False)
    assert output.outputs.data.shape == (3, 2)
    [output] = llm.encode([5, 6, 7], PoolingParams(task="token_classify"), pooling_task="classify", use_tqdm=False)
    assert output.outputs.data.shape == (6,)
    assert engine.requests[-1].pooling == PoolingParams(task="classify"), "the argument beats the parameters"


def test_a_task_is_that_of_the_parameters_where_no_other_is_given(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "classify", "token_embed")
    engine.make = lambda request: np.arange(6, dtype=np.float32)
    cases: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [
        ({}, "classify", (6,)),
        ({"pooling_params": PoolingParams(task="token_embed")}, "token_embed", (3, 2)),
        ({"pooling_params": PoolingParams(), "pooling_task": "token_embed"}, "token_embed", (3, 2)),
    ]
    for options, task, shape in cases:
        [output] = llm.encode([5, 6, 7], use_tqdm=False, **options)
        params = engine.requests[-1].pooling
        assert params is not None
        assert (params.task, output.outputs.data.shape) == (task, shape)


def test_lexical_weights_are_one_number_a_token(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed", "token_classify")
    engine.make = lambda request: np.arange(3, dtype=np.float32)
    [output] = llm.encode([5, 6, 7], pooling_task="token_classify", use_tqdm=False)
    assert output.outputs.data.shape == (3,)


def test_labels_are_a_list_of_probabilities(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "classify")
    engine.make = lambda request: vector(0.25, 0.75)
    [output] = llm.classify([5], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert output.outputs == ClassificationOutput([0.25, 0.75])
    assert output.outputs.num_classes == 2
    assert engine.requests[0].pooling == PoolingParams(task="classify", use_activation=False)


def test_parameters_may_be_one_a_prompt(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    both = [PoolingParams(dimensions=1), PoolingParams(dimensions=2)]
    llm.encode([[5], [6]], both, use_tqdm=False)
    assert [request.pooling for request in engine.requests] == [with_task(one, "embed") for one in both]
    with pytest.raises(InvalidRequest, match="pooling_params has 2 entries, there are 1 prompts") as caught:
        llm.encode([[5]], both, use_tqdm=False)
    assert caught.value.field == "pooling_params"
    assert len(engine.requests) == 2


def test_special_tokens_are_left_out_where_the_call_says_so() -> None:
    stories = Tokenizer.load(str(Path(__file__).resolve().parents[3] / "data/stories260K"))
    llm, engine = calls(stories, "embed")
    for options in ({}, {"tokenization_kwargs": {"add_special_tokens": False}}):
        llm.embed("a dog", use_tqdm=False, **options)
    ids = stories.encode("a dog", add_special_tokens=False)
    assert [request.prompt_token_ids for request in engine.requests] == [[1, *ids], ids]


def test_options_reach_the_maker_of_prompts(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    ids = tokenizer.encode("one two three four")
    llm.embed("one two three four", use_tqdm=False, truncate_prompt_tokens=2)
    llm.embed("one two three four", use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 3})
    llm.embed("one two three four", use_tqdm=False, tokenization_kwargs=None)
    assert [request.prompt_token_ids for request in engine.requests] == [ids[-2:], ids[-3:], ids]
    with pytest.raises(InvalidRequest, match="tokenization_kwargs has 'padding', must be add_special_tokens and trunc"):
        llm.embed("one", use_tqdm=False, tokenization_kwargs={"padding": 1})
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.embed("one", use_tqdm=False, prompt_name="unknown")


@pytest.mark.parametrize("call", ["embed", "encode", "classify", "reward", "score"])
def test_what_vllm_takes_besides_is_refused(tokenizer: Tokenizer, call: str) -> None:
    llm, engine = calls(tokenizer, "embed", "classify", "token_classify")
    prompts = ("a", "b") if call == "score" else ("a",)
    with pytest.raises(InvalidRequest, match="lora_request is not supported") as caught:
        getattr(llm, call)(*prompts, use_tqdm=False, lora_request=object())
    assert caught.value.field == "lora_request"
    with pytest.raises(TypeError, match="unexpected argument 'nonsense'"):
        getattr(llm, call)(*prompts, use_tqdm=False, nonsense=1)
    assert engine.requests == []


@pytest.mark.parametrize("call", ["embed", "encode", "classify", "reward", "score"])
def test_a_sleeping_model_is_not_asked(tokenizer: Tokenizer, call: str) -> None:
    llm, engine = calls(tokenizer, "embed", "classify", "token_classify", "score")
    engine.is_sleeping = True
    texts = ("a", "b") if call == "score" else ("a",)
    with pytest.raises(NotReady, match="sleeps"):
        getattr(llm, call)(*texts, use_tqdm=False)
    assert engine.requests == []
    similar, engine = calls(tokenizer, "embed")
    engine.is_sleeping = True
    with pytest.raises(NotReady, match="sleeps"):
        similar.score("a", "b", use_tqdm=False)


def test_a_model_that_scores_gets_pairs(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "score", "embed")
    engine.make = lambda request: vector(len(request.prompt_token_ids), 9)
    params = PoolingParams(use_activation=False)
    outputs = llm.score("a dog", ["a cat", "a very old house"], pooling_params=params, use_tqdm=False)
    expected = [tokenizer.encode("a dog") + tokenizer.encode(text) for text in ("a cat", "a very old house")]
    assert [output.outputs.score for output in outputs] == [len(ids) for ids in expected]
    assert all(request.pooling is not None and request.pooling.task == "score" for request in engine.requests)
    assert all(request.pooling is not None and request.pooling.use_activation is False for request in engine.requests)
    llm.score("a dog", "a cat", use_tqdm=False, truncate_prompt_tokens=3)
    assert len(engine.requests[-1].prompt_token_ids) == 3
    kept = PoolingParams(extra_kwargs={"max_tokens_per_doc": 1})
    llm.score("a dog", "a cat", use_tqdm=False, pooling_params=kept)
    cut = tokenizer.cut("a cat", 1)
    assert engine.requests[-1].prompt_token_ids == tokenizer.encode("a dog") + tokenizer.encode(cut)
    kept = PoolingParams(extra_kwargs={"max_tokens_per_query": 1})
    llm.score("a dog", "a cat", use_tqdm=False, pooling_params=kept)
    assert engine.requests[-1].prompt_token_ids == tokenizer.encode(tokenizer.cut("a dog", 1)) + tokenizer.encode(
        "a cat"
    )


def test_texts_whose_vectors_are_compared_are_cut_too(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    engine.make = lambda request: vector(1, 2)
    kept = PoolingParams(extra_kwargs={"max_tokens_per_query": 1, "max_tokens_per_doc": 2})
    [output] = llm.score("a dog that barks", "a cat that sleeps", use_tqdm=False, pooling_params=kept)
    cut = tokenizer.cut("a dog that barks", 1), tokenizer.cut("a cat that sleeps", 2)
    assert [request.prompt_token_ids for request in engine.requests] == [tokenizer.encode(text) for text in cut]
    assert output.prompt_token_ids == [one for text in cut for one in tokenizer.encode(text)]


def test_texts_of_a_model_that_embeds_are_compared_by_their_vectors(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed", "token_embed")
    vectors = {tuple(tokenizer.encode(text)): vector(*values) for text, values in (("a", (1, 0)), ("b", (0, 2)))}
    vectors |= {tuple(tokenizer.encode(text)): vector(*values) for text, values in (("c", (3, 4)), ("d", (1, 1)))}
    engine.make = lambda request: vectors[tuple(request.prompt_token_ids)]
    outputs = llm.score(["a", "b", "a"], ["c", "c", "b"], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx([0.6, 0.8, 0.0])
    assert len(engine.requests) == 3, "each text once"
    assert all(request.pooling == PoolingParams(task="embed") for request in engine.requests)
    one, other = tokenizer.encode("b"), tokenizer.encode("c")
    assert outputs[1].prompt_token_ids == one + other
    named = {request.request_id: request.prompt_token_ids for request in engine.requests}
    assert named[outputs[1].request_id] == other


def test_texts_of_a_model_of_token_vectors_are_compared_token_by_token(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "token_embed", "embed")
    rows = {
        tuple(tokenizer.encode("a b")): [[1, 0], [0, 1]],
        tuple(tokenizer.encode("c d")): [[2, 0], [3, 5]],
    }
    assert all(len(ids) == 2 for ids in rows), "two tokens each"
    engine.make = lambda request: np.array(rows[tuple(request.prompt_token_ids)], np.float32).reshape(-1)
    [output] = llm.score("a b", "c d", use_tqdm=False)
    assert output.outputs.score == 8.0  # 3 of the first token, 5 of the second one
    assert all(request.pooling == PoolingParams(task="token_embed") for request in engine.requests)


@pytest.mark.parametrize(
    ("tasks", "can"),
    [(("classify",), "num_labels == 1: it can classify"), ((), "Scoring API: it can only generate")],
)
def test_a_model_that_neither_scores_nor_embeds_is_not_asked(
    tokenizer: Tokenizer, tasks: tuple[PoolingTask, ...], can: str
) -> None:
    llm, engine = calls(tokenizer, *tasks)
    with pytest.raises(InvalidRequest, match=f"Unsupported task: 'score'. .*{can}"):
        llm.score("a", "b", use_tqdm=False)
    with pytest.raises(InvalidRequest, match=f"'embed'.*{can.rpartition(': ')[2]}"):
        llm.embed("a", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="data_1 has 2 texts, must have 1 or as many as data_2, 3"):
        llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="data_2 is empty"):
        llm.score("a", [], use_tqdm=False)
    assert engine.requests == []


def test_no_more_than_the_bound_are_under_way(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_calls, "MAX_OPEN_REQUESTS", 3)
    llm, engine = calls(tokenizer, "embed")
    assert len(llm.embed([[number] for number in range(1, 11)], use_tqdm=False)) == 10
    assert engine.most_open == 3


def test_the_bar_counts_prompts(tokenizer: Tokenizer) -> None:
    llm, _ = calls(tokenizer, "embed")
    made: list[dict[str, Any]] = []
    num_updates = 0

    def update() -> None:
        nonlocal num_updates
        num_updates += 1

    def make_bar(**options: Any) -> AbstractContextManager[Any]:
        made.append(options)
        return nullcontext(SimpleNamespace(update=update))

    llm.embed([[5], [6], [7]], use_tqdm=make_bar)
    assert made == [{"total": 3, "desc": "Processed prompts", "disable": False, "dynamic_ncols": True}]
    assert num_updates == 3


def test_the_first_failure_is_raised(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    engine.error = QueueFull("full")
    with pytest.raises(QueueFull, match="full"):
        llm.embed([[5], [6]], use_tqdm=False)
    engine.error, engine.make = None, lambda request: None
    with pytest.raises(PagodaError, match="the request was aborted") as caught:
        llm.embed([5], use_tqdm=False)
    assert caught.value.code is Code.CANCELLED
    assert engine.num_aborts == len(engine.requests)


async def test_pieces_become_their_mean_and_keep_their_ids() -> None:
    engine = Engine("embed")
    engine.make = lambda request: vector(len(request.prompt_token_ids), 0)
    made = PoolingPrompt([1, 2, 3], second_text_start=2, rest=([4],))
    given = PoolingInput(made, cache_salt="mine")
    assert [(prompt.text, prompt.token_ids, prompt.cache_salt) for prompt in given.prompts()] == [
        (None, [1, 2, 3], "mine"),
        (None, [4], "mine"),
    ]
    requests = [
        EngineRequest(request_id=name, prompt_token_ids=ids, sampling_params=POOLED)
        for name, ids in (("r", [1, 2, 3]), ("r-1", [4]))
    ]
    output = await pool_input(cast("Any", engine), requests, given, PoolingParams(task="embed"))
    assert (output.request_id, output.prompt_token_ids) == ("r", [1, 2, 3, 4])
    assert (output.num_cached_tokens, output.num_pieces) == (4, 2)
    np.testing.assert_allclose(output.outputs.data, [(3 * 3 + 1) / 4, 0])
    assert [request.pooling for request in requests] == [PoolingParams(task="embed", second_text_start=2)] * 2


async def test_requests_of_pieces_have_names_of_their_own(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    engine.make = lambda request: vector(1, 2)
    given = PoolingInput(PoolingPrompt([1, 2], rest=([3], [4])), "salt")
    await llm._async_llm.pool(given, PoolingParams(task="embed"), request_id="mine", priority=3)
    assert [request.request_id for request in engine.requests] == ["mine", "mine-1", "mine-2"]
    assert {(request.priority, request.cache_salt) for request in engine.requests} == {(3, "salt")}
    engine.requests.clear()
    await llm._async_llm.pool(given, PoolingParams(task="embed"))
    assert len({request.request_id for request in engine.requests}) == 3


@pytest.mark.parametrize(
    ("num_tokens", "num_values", "shape"),
    [(3, 6, (3, 2)), (3, 3, (3, 1)), (3, 4, (2, 2)), (3, 5, (5, 1)), (1, 4, (1, 4)), (2, 3, (1, 3))],
)
def test_rows_are_tokens_or_all_but_the_first(num_tokens: int, num_values: int, shape: tuple[int, int]) -> None:
    data = PoolingOutput(np.arange(num_values, dtype=np.float32))
    output = PoolingRequestOutput(request_id="a", outputs=data, prompt_token_ids=list(range(num_tokens)))
    assert by_token(output).shape == shape


def test_tasks_come_from_the_model_or_from_its_embeddings() -> None:
    known = types_pb2.POOLING_TASK_SCORE, types_pb2.POOLING_TASK_UNSPECIFIED, types_pb2.POOLING_TASK_EMBED
    assert pooling_tasks(types_pb2.ModelInfo(pooling_tasks=known, embedding_size=3)) == ("score", "embed")
    assert pooling_tasks(types_pb2.ModelInfo(embedding_size=3)) == ("embed",)
    assert pooling_tasks(types_pb2.ModelInfo()) == ()


def test_an_embedding_is_the_same_output_with_a_list() -> None:
    output = PoolingRequestOutput(request_id="a", outputs=PoolingOutput(vector(1, 2)), prompt_token_ids=[5])
    assert as_embedding(output) is output
    assert output.outputs == EmbeddingOutput([1.0, 2.0])


async def test_async_calls_take_one_prompt_and_the_models_first_task(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "token_classify", "embed")
    one = llm._async_llm
    [output] = [output async for output in one.encode([5, 6], request_id="mine", priority=4)]
    assert output.request_id == "mine"
    assert (engine.requests[-1].priority, engine.requests[-1].pooling) == (4, PoolingParams())
    [_] = [output async for output in one.encode([5, 6], PoolingParams(task="embed", dimensions=1))]
    assert engine.requests[-1].pooling == PoolingParams(task="embed", dimensions=1)
    embedded = await one.embed([5, 6], PoolingParams(normalize=False), "other", priority=2)
    assert embedded.outputs == EmbeddingOutput([5.0, 6.0])
    assert engine.requests[-1].pooling == PoolingParams(task="embed", normalize=False)
    assert (engine.requests[-1].request_id, engine.requests[-1].priority) == ("other", 2)
    with pytest.raises(InvalidRequest, match="encode takes one prompt, got 2"):
        await anext(one.encode([[5], [6]]))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidRequest, match="embed takes one prompt, got 2"):
        await one.embed([[5], [6]])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidRequest, match="trace_headers is not supported"):
        await anext(one.encode([5], trace_headers={"a": "b"}))
    with pytest.raises(InvalidRequest, match="trace_headers is not supported"):
        await one.embed([5], trace_headers={"a": "b"})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt is empty: it must have at least one token"), ([True], "has token True, which is not a token id")],
)
def test_prompts_that_are_none_are_named_by_their_place(tokenizer: Tokenizer, prompt: Any, message: str) -> None:
    llm, _ = calls(tokenizer, "embed")
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.embed([[5], {"prompt_token_ids": prompt}], use_tqdm=False)
    assert caught.value.field == "prompts[1]"


def test_the_token_ids_of_a_prompt_count_and_not_its_text(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    llm.embed({"prompt": "another text", "prompt_token_ids": [5, 6], "cache_salt": "mine"}, use_tqdm=False)
    [request] = engine.requests
    assert (request.prompt_token_ids, request.cache_salt) == ([5, 6], "mine")


def test_what_only_pools_is_cut_on_the_right(tokenizer: Tokenizer) -> None:
    llm, engine = calls(tokenizer, "embed")
    for only_pools, kept in ((True, [1, 2]), (False, [3, 4])):
        engine.model_info.only_pools = only_pools
        llm.embed([1, 2, 3, 4], use_tqdm=False, truncate_prompt_tokens=2)
        assert engine.requests[-1].prompt_token_ids == kept
    llm.embed([5] * 150, use_tqdm=False, truncate_prompt_tokens=-1)
    assert len(engine.requests[-1].prompt_token_ids) == 100


def test_an_llm_has_these_calls() -> None:
    for name in ("embed", "encode", "classify", "reward", "score"):
        assert getattr(LLM, name) is getattr(EmbedCalls, name)
