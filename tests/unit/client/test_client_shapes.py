"""Every field of what LLM gives: metrics, outputs, hypotheses, the served model, adapters; helpers of vLLM."""

import gc
import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest

import pagoda
from pagoda import BeamSearchParams, EngineArgs, SamplingParams, StructuredOutputsParams
from pagoda.commands import collect_env
from pagoda.distributed import cleanup_dist_env_and_memory
from pagoda.llm.beam_search import BeamSearchOutput, BeamSearchSequence, beam_search_output
from pagoda.llm.metrics import (
    FIRST_TOKEN_BOUNDS_S,
    LENGTH_BOUNDS,
    Counter,
    Gauge,
    GenerationCounts,
    Histogram,
    Vector,
    snapshot,
)
from pagoda.llm.prompts import Prompt
from pagoda.llm.request_output import RequestOutputBuilder, logprobs_by_token
from pagoda.llm.served_model import ServedModelConfig
from pagoda.lora.request import LoRARequest, adapter_of, adapters_of
from pagoda.options.refusals import RefusedCalls
from pagoda.utils import Counter as Numbers
from pagoda.utils import random_uuid
from pagoda.utils.argparse_utils import FlexibleArgumentParser
from pagoda.utils.print_utils import print_embeddings
from pagoda.v1 import types_pb2
from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.engine.stream import EngineRequest
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.outputs import (
    CompletionOutput,
    HypothesisLogprobs,
    Logprob,
    RequestOutput,
    RequestStateStats,
    SequenceDelta,
    TokenLogprobs,
)
from pagoda_common.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def test_every_metric_of_a_program() -> None:
    load = types_pb2.EngineLoad(
        num_used_blocks=3,
        num_total_blocks=12,
        num_running_reqs=1,
        num_waiting_reqs=2,
        prefix_cache_queries=4,
        prefix_cache_hits=5,
        num_preemptions=6,
        num_worker_losses=7,
        num_steps=8,
        speculation=types_pb2.SpeculationLoad(
            num_drafts=9, num_draft_tokens=10, num_accepted_tokens=11, num_accepted_tokens_per_pos=[12, 13]
        ),
    )
    counts = GenerationCounts()
    completions = [
        CompletionOutput(0, "", [1, 2, 3], finish_reason="stop"),
        CompletionOutput(1, "", [1], finish_reason="length"),
        CompletionOutput(2, "", [1, 2]),
    ]
    stats = RequestStateStats(first_token_ts=5.0, first_token_latency=0.02)
    counts.add(RequestOutput("a", None, [5] * 4, completions, finished=True, metrics=stats))
    counts.add(RequestOutput("b", None, [5], completions[:1], finished=True))
    labels = {"model_name": "m", "engine": "0"}
    *single, first, prompts, outputs, _, _, _, _ = snapshot(load, counts, model_name="m")
    assert single == [
        Gauge("vllm:num_requests_running", labels, 1.0),
        Gauge("vllm:num_requests_waiting", labels, 2.0),
        Gauge("vllm:kv_cache_usage_perc", labels, 0.25),
        Counter("vllm:prefix_cache_queries", labels, 4),
        Counter("vllm:prefix_cache_hits", labels, 5),
        Counter("vllm:num_preemptions", labels, 6),
        Counter("pagoda:worker_losses", labels, 7),
        Counter("pagoda:engine_steps", labels, 8),
        Counter("vllm:prompt_tokens", labels, 5),
        Counter("vllm:generation_tokens", labels, 9),
        Counter("vllm:request_success", {**labels, "finished_reason": "length"}, 1),
        Counter("vllm:request_success", {**labels, "finished_reason": "stop"}, 2),
    ]
    for metric, name, count, total, bound in (
        (first, "vllm:time_to_first_token_seconds", 1, 0.02, "0.02"),
        (prompts, "vllm:request_prompt_tokens", 2, 5.0, "5.0"),
        (outputs, "vllm:request_generation_tokens", 4, 9.0, "5.0"),
    ):
        assert isinstance(metric, Histogram)
        assert (metric.name, metric.labels, metric.count, metric.sum) == (name, labels, count, total)
        assert metric.buckets[bound] == metric.buckets["+Inf"] == count
    assert cast("Histogram", outputs).buckets["1.0"] == 1
    assert cast("Histogram", outputs).buckets["2.0"] == 2
    assert cast("Histogram", first).buckets["0.01"] == 0
    assert snapshot(load, counts, model_name="m")[-4:] == [
        Counter("vllm:spec_decode_num_drafts", labels, 9),
        Counter("vllm:spec_decode_num_draft_tokens", labels, 10),
        Counter("vllm:spec_decode_num_accepted_tokens", labels, 11),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [12, 13]),
    ]
    plain = snapshot(types_pb2.EngineLoad(), GenerationCounts(), model_name="m")
    assert plain[2] == Gauge("vllm:kv_cache_usage_perc", labels, 0.0)
    assert len(plain) == 13


def test_bounds_of_histograms() -> None:
    assert LENGTH_BOUNDS[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert LENGTH_BOUNDS[-1] == 5_000_000
    assert tuple(round(0.01 * 2**power, 2) for power in range(13)) == FIRST_TOKEN_BOUNDS_S


INFO = types_pb2.ModelInfo(model="m", dtype="float16", max_model_len=9, vocab_size=8, embedding_size=7)


def test_the_served_model_is_what_the_engine_reports_and_what_was_asked_for() -> None:
    plain = ServedModelConfig.of(INFO, ModelConfig(model="other", seed=5))
    assert plain == ServedModelConfig(
        model="m",
        tokenizer="m",
        served_model_name="m",
        dtype="float16",
        max_model_len=9,
        vocab_size=8,
        hidden_size=7,
        seed=5,
    )
    named = ServedModelConfig.of(INFO, ModelConfig(tokenizer="t", served_model_name=("one", "two")))
    assert (named.tokenizer, named.served_model_name) == ("t", "one")
    assert (named.get_vocab_size(), named.embedding_size, named.get_hidden_size()) == (8, 7, 7)


def test_a_search_asks_for_as_many_sequences_as_beams() -> None:
    structured = StructuredOutputsParams(choice=["a"])
    params = BeamSearchParams(
        beam_width=3, max_tokens=5, ignore_eos=True, include_stop_str_in_output=True, structured_outputs=structured
    )
    assert params.sampling_params() == SamplingParams(
        n=3, max_tokens=5, ignore_eos=True, include_stop_str_in_output=True, seed=0, structured_outputs=structured
    )
    plain = BeamSearchParams(beam_width=1, max_tokens=2)
    assert (plain.ignore_eos, plain.temperature, plain.include_stop_str_in_output) == (False, 0.0, False)


def test_hypotheses_have_the_prompts_tokens_and_the_reason(tokenizer: Tokenizer) -> None:
    row = {7: Logprob(-1.0)}
    outputs = [
        CompletionOutput(0, "", [7, 2], cumulative_logprob=-2.0, logprobs=[row, row], finish_reason="stop"),
        CompletionOutput(1, "", [7, 8], finish_reason="length", stop_reason="x"),
        CompletionOutput(2, "", [], finish_reason="stop", stop_reason=9),
    ]
    given = RequestOutput("a", None, [5, 6], outputs, finished=True)

    def text(*token_ids: int) -> str:
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def shaped(**options: Any) -> list[BeamSearchSequence]:
        params = BeamSearchParams(beam_width=3, max_tokens=2, **options)
        found = beam_search_output(given, params, tokenizer)
        assert isinstance(found, BeamSearchOutput)
        return found.sequences

    assert shaped() == [
        BeamSearchSequence([5, 6, 7], [row, row], -2.0, text(5, 6, 7), "stop", 2),
        BeamSearchSequence([5, 6, 7, 8], [], 0.0, text(5, 6, 7, 8), "length", "x"),
        BeamSearchSequence([5, 6], [], 0.0, text(5, 6), "stop", 9),
    ]
    kept = shaped(include_stop_str_in_output=True)[0]
    assert (kept.tokens, kept.text, kept.stop_reason) == ([5, 6, 7, 2], text(5, 6, 7, 2), 2)
    assert outputs[0].token_ids == [7, 2], "what was given stays"


def builder(tokenizer: Tokenizer, **params: Any) -> RequestOutputBuilder:
    request = EngineRequest(request_id="r", prompt_token_ids=[5, 6], sampling_params=SamplingParams(**params))
    return RequestOutputBuilder(request=request, prompt=Prompt(text="its text", token_ids=[5, 6]), tokenizer=tokenizer)


def delta(**fields: Any) -> SequenceDelta:
    return SequenceDelta(**{"index": 0, "text": "", "token_ids": [], "offset": 0} | fields)


def test_every_field_of_an_output(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, n=2, logprobs=1)
    entry = TokenLogprobs([7, 8], [-0.5, -1.5], 1)
    made.append([delta(text="x", token_ids=[7], logprobs=[entry], num_cached_tokens=2, queue_s=0.5)])
    made.append([delta(index=1, text="y", token_ids=[9], logprobs=[TokenLogprobs([9], [-2.0], 3)])])
    made.append([delta(index=1, finish_reason="stop", stop_reason="END")])
    made.prompt_logprobs = [None, TokenLogprobs([6], [-4.0], 2)]
    output = made.build()
    seven, eight, nine, six = (tokenizer.token_text(token_id) for token_id in (7, 8, 9, 6))
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "its text", [5, 6])
    assert (output.finished, output.num_cached_tokens) == (False, 2)
    assert output.prompt_logprobs == [None, {6: Logprob(-4.0, 2, six)}]
    first, second = output.outputs
    assert first == CompletionOutput(0, "x", [7], -0.5, [{7: Logprob(-0.5, 1, seven), 8: Logprob(-1.5, 1, eight)}])
    assert second == CompletionOutput(1, "y", [9], -2.0, [{9: Logprob(-2.0, 3, nine)}], "stop", "END")
    assert output.metrics is not None
    assert output.metrics.scheduled_ts == pytest.approx(output.metrics.queued_ts + 0.5)
    assert output.metrics.arrival_time > 1e9
    assert made.num_output_tokens == 2
    made.append([delta(finish_reason="length")])
    assert made.build().finished


@pytest.mark.parametrize(
    ("params", "has_logprobs"),
    [({}, False), ({"logprobs": 0}, True), ({"logprob_token_ids": [4]}, True), ({"prompt_logprobs": 1}, False)],
)
def test_log_probabilities_are_there_when_they_were_asked_for(
    tokenizer: Tokenizer, params: dict[str, Any], has_logprobs: bool
) -> None:
    [completion] = builder(tokenizer, **params).build().outputs
    assert (completion.logprobs is not None, completion.cumulative_logprob is not None) == (has_logprobs,) * 2


def test_a_search_has_the_log_probabilities_of_its_result(tokenizer: Tokenizer) -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=[5],
        sampling_params=SamplingParams(),
        beam_search=BeamSearchParams(beam_width=1, max_tokens=2),
    )
    made = RequestOutputBuilder(request=request, prompt=Prompt(text=None, token_ids=[5]), tokenizer=tokenizer)
    made.append([delta(token_ids=[7, 8], hypothesis=HypothesisLogprobs(-3.0, [-1.0, -2.0], [4, 5]))])
    [completion] = made.build().outputs
    assert completion.cumulative_logprob == -3.0
    assert completion.logprobs == [
        {7: Logprob(-1.0, 4, tokenizer.token_text(7))},
        {8: Logprob(-2.0, 5, tokenizer.token_text(8))},
    ]


def test_chosen_tokens_have_no_rank_and_without_text_there_is_none(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs([7, 8], [-1.0, -2.0], 6)
    assert logprobs_by_token(entry, None, are_ranked=False) == {7: Logprob(-1.0, 6), 8: Logprob(-2.0)}
    made = builder(tokenizer, logprob_token_ids=[8], detokenize=False)
    made.append([delta(token_ids=[7], logprobs=[entry])])
    assert made.build().outputs[0].logprobs == [{7: Logprob(-1.0, 6), 8: Logprob(-2.0)}]


def test_an_adapter_has_the_requests_names_and_number() -> None:
    request = LoRARequest("style", 3, "/path", base_model_name="base")
    assert request.adapter == LoraAdapter(name="style", path="/path", version=3, base_model_name="base")
    assert (request.name, request.path, request.adapter_id) == ("style", "/path", 3)
    assert LoRARequest("a", 1, "/p").adapter.base_model_name == ""
    with pytest.raises(ValueError, match="lora_int_id is 0, must be at least 1"):
        LoRARequest("a", 0, "/p")
    with pytest.raises(InvalidRequest, match="lora_request 'a' has no lora_path") as caught:
        adapter_of(LoRARequest("a", 1))
    assert caught.value.field == "lora_request"


def test_adapters_are_one_for_all_or_one_a_prompt() -> None:
    one, other = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    assert adapters_of(None, 2) == [None, None]
    assert adapters_of(one, 2) == [one.adapter] * 2
    assert adapters_of([one, None, other], 3) == [one.adapter, None, other.adapter]
    with pytest.raises(InvalidRequest, match="lora_request has 2 entries, there are 3 prompts") as caught:
        adapters_of([one, other], 3)
    assert caught.value.field == "lora_request"
    with pytest.raises(InvalidRequest, match="lora_request must be a LoRARequest, got str"):
        adapters_of("style", 5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("collective_rpc", "workers are separate processes"),
        ("apply_model", "the model is in another process"),
        ("start_profile", "`pagoda serve --scheduler-metrics-port`"),
        ("stop_profile", "there is no start_profile"),
        ("reset_mm_cache", "models take text only"),
        ("init_weight_transfer_engine", "weights come from checkpoints"),
        ("update_weights", "weights come from checkpoints: LLM.reload_weights"),
    ],
)
def test_calls_that_there_are_not_say_why(call: str, reason: str) -> None:
    with pytest.raises(PagodaError, match=f"LLM.{call} is not supported: {reason}") as caught:
        getattr(RefusedCalls(), call)(1, a=2)
    assert caught.value.code is Code.UNIMPLEMENTED


def test_vectors_are_printed_in_few_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([1.0, 2.0, 3.0, 4.0])
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0], prefix="Scores")
    assert capsys.readouterr().out.splitlines() == [
        "Embeddings: [1.0, 2.0, 3.0, 4.0] (size=4)",
        "Scores: [1.0, 2.0, 3.0, 4.0, ...] (size=5)",
    ]


def test_small_helpers() -> None:
    numbers = Numbers()
    assert [next(numbers), next(numbers), next(Numbers(7))] == [0, 1, 7]
    assert (len(random_uuid()), random_uuid() == random_uuid()) == (32, False)
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-model-len", type=int)
    assert parser.parse_args(["--max_model_len", "5"]).max_model_len == 5
    assert parser.parse_known_args(["--max_model_len=6", "--other_one"])[1] == ["--other-one"]


def test_what_nothing_refers_to_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    cleanup_dist_env_and_memory(shutdown_ray=True)
    assert calls == ["collect"]


def test_arguments_that_are_given_are_keywords() -> None:
    assert EngineArgs(model="m", seed=0, enable_prefix_caching=False).keywords() == {
        "model": "m",
        "seed": 0,
        "enable_prefix_caching": False,
    }
    assert EngineArgs().keywords() == {}


def test_a_machine_is_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = SimpleNamespace(stdout="A, 10 MiB, 1\nB, 20 MiB, 1\n", stderr="")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    processes = SimpleNamespace(run=lambda command, **_: answer, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(collect_env, "subprocess", processes)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    sizes = {"SC_PHYS_PAGES": 3 * 2**18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert collect_env.run(cast("Any", None), cast("Any", None)) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["cpus"], shown["memory"], shown["gpus"]) == ("7", "3.0 GiB", "A, 10 MiB, 1; B, 20 MiB, 1")
    assert shown["pagoda"] == pagoda.__version__
    assert shown.keys() >= {"python", "system", "torch", "grpcio", "aiohttp", "llguidance"}
    answer.stdout, answer.stderr = "", " no devices \n"
    assert collect_env._gpus() == "no devices"
    answer.stderr = ""
    assert collect_env._gpus() == "none"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("broken")

    processes.run = fail
    assert collect_env._gpus() == "nvidia-smi failed: broken"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert collect_env._gpus() == "no nvidia-smi"
    assert collect_env._version("no-such-package-at-all") == "not installed"
