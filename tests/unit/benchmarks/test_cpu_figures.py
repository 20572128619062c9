"""The comparison on a CPU: workloads, what they cost at least, medians, ratios, goals and tables."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer

from benchmarks.cpu.checkpoints import tokenizer
from benchmarks.cpu.goals import OURS, goals, prefix_bound_s, read_fraction
from benchmarks.cpu.plot import svg
from benchmarks.cpu.report import report, table
from benchmarks.cpu.results import Results
from benchmarks.cpu.shapes import SHAPES, Roofline, WeightBytes
from benchmarks.cpu.workloads import MAX_MODEL_LEN, WORKLOADS, Workload, warm_up

ROOFLINE = Roofline(read_bytes_per_s=26e9, flop_per_s=500e9)


def measured() -> Results:
    """Two rounds of three engines."""
    results = Results()
    for seconds in (2.0, 4.0):
        results.add("W1", OURS, {"seconds": seconds, "gap_s": 0.01, "ttft_s": 0.1})
    for seconds in (6.0, 7.0, 50.0):
        results.add("W1", "vllm", {"seconds": seconds, "gap_s": 0.05, "ttft_s": 0.1})
    results.add("W1", "openvino", {"seconds": 1.5, "gap_s": 0.008, "ttft_s": 0.1})
    results.add("W3", OURS, {"seconds": 10.0, "output_tok_s": 409.6, "ttft_s": 0.5})
    results.add("W3", "pagoda-in-process", {"seconds": 9.0})
    return results


def test_workloads_are_those_of_the_comparison() -> None:
    lens = {name: (workload.num_prompt_tokens, workload.num_output_tokens) for name, workload in WORKLOADS.items()}
    assert lens == {"W1": (128, 128), "W2": (4608, 2048), "W3": (8192, 4096), "W4": (33792, 512), "W5": (2048, 1)}
    assert min(WORKLOADS["W2"].prompt_lens) == 32
    assert max(WORKLOADS["W2"].prompt_lens) == 256
    assert all(one.max_len <= MAX_MODEL_LEN for one in WORKLOADS.values())


def test_prompts_are_the_same_for_a_seed_and_share_only_their_prefix() -> None:
    workload = WORKLOADS["W4"]
    prompts = workload.prompts(vocab_size=32000, seed="0")
    assert prompts == workload.prompts(vocab_size=32000, seed="0")
    other = workload.prompts(vocab_size=32000, seed="1")
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 32
    assert prompts[0][:1024] != other[0][:1024]
    assert [len(prompt) for prompt in prompts] == list(workload.prompt_lens)
    assert all(300 <= token < 32000 - 8 for prompt in prompts for token in prompt)


def test_a_warm_up_has_the_batch_but_few_outputs_and_no_prefix() -> None:
    assert warm_up(WORKLOADS["W2"]).prompt_lens == WORKLOADS["W2"].prompt_lens
    assert warm_up(WORKLOADS["W2"]).num_outputs == 4
    assert warm_up(WORKLOADS["W4"]).prompt_lens == (32,) * 32
    assert warm_up(WORKLOADS["W5"]).num_output_tokens == 1
    assert len(warm_up(WORKLOADS["W3"]).prompt_lens) == 16


def test_shapes_have_the_weights_that_they_are_named_after() -> None:
    assert SHAPES["125m"].num_params == pytest.approx(134.1e6, rel=1e-3)  # two tables of 24.6 M
    assert SHAPES["0.6b"].num_params == pytest.approx(595.8e6, rel=1e-3)
    assert SHAPES["0.6b"].step_bytes(num_cached=0) == pytest.approx(1.19e9, rel=1e-2)
    assert SHAPES["125m"].kv_bytes_per_token == 12 * 2 * 768 * 2


def test_one_row_is_bound_by_bytes_and_a_prompt_by_operations() -> None:
    shape = SHAPES["125m"]
    assert ROOFLINE.step_s(shape, cached_lens=[0]) == shape.step_bytes(num_cached=0) / 26e9
    half = WeightBytes(linear=1.0, head=1.0)
    assert ROOFLINE.step_s(shape, cached_lens=[0], weight_bytes=half) == shape.step_bytes(num_cached=0) / 2 / 26e9
    many = ROOFLINE.step_s(shape, cached_lens=[0] * 64)
    assert many == shape.flop(num_tokens=64, num_pairs=0, num_sampled=64) / 500e9
    one = Workload(name="x", title="", prompt_lens=(2,), num_outputs=1)
    assert ROOFLINE.workload_s(shape, one) == shape.flop(num_tokens=2, num_pairs=2, num_sampled=1) / 500e9


def test_a_shared_prefix_is_computed_once() -> None:
    shape = SHAPES["125m"]
    apart = Workload(name="x", title="", prompt_lens=(1056,) * 4, num_outputs=1)
    shared = Workload(name="x", title="", prompt_lens=(1056,) * 4, num_outputs=1, prefix_len=1024)
    assert 3 < ROOFLINE.workload_s(shape, apart) / ROOFLINE.workload_s(shape, shared) < 4


def test_medians_ratios_and_the_best() -> None:
    results = measured()
    assert results.median("W1", OURS) == 3.0
    assert results.median("W1", "vllm") == 7.0
    assert results.median("W2", "vllm") is None
    assert results.ratio("W1", "openvino", OURS) == 0.5
    assert results.ratio("W1", "transformers", OURS) is None
    assert results.best("W1", ["vllm", "openvino", "transformers"]) == "openvino"
    assert results.best("W2", ["vllm"]) is None
    assert results.spread("W1", OURS) == 2.0
    assert ("W1_vllm_seconds", 7.0, "s", 3) in list(results.figures())


def test_the_bound_of_w4_comes_from_the_rates_of_w5_and_w2() -> None:
    results = Results()
    results.add("W5", OURS, {"seconds": 2.048})  # a millisecond a token
    results.add("W2", OURS, {"seconds": 4.608 + 63 * 0.1})
    assert prefix_bound_s(results, WORKLOADS) == pytest.approx(2.048 + 15 * 0.1)
    assert prefix_bound_s(Results(), WORKLOADS) is None


def test_goals_say_what_is_met() -> None:
    found = {goal.text: goal for goal in goals(measured(), SHAPES["125m"], WORKLOADS, ROOFLINE, ["vllm", "openvino"])}
    vllm = found["W1: times as fast as vLLM (vllm)"]
    assert (round(vllm.value, 2), vllm.is_met) == (2.33, True)
    assert not found["W1: times as fast as the best peer (openvino)"].is_met
    server = found["W3: time of the server by that of the engine in process"]
    assert (round(server.value, 2), server.is_met) == (1.11, False)
    read = found["W1: fraction of the read limit between tokens"]
    assert read.value == read_fraction(SHAPES["125m"], WORKLOADS["W1"], ROOFLINE, 0.01)
    assert 0.8 < read.value < 0.9
    assert not read.is_met
    assert not any(text.startswith("W4") for text in found)


def test_the_report_has_a_row_an_engine_and_says_what_is_missing() -> None:
    results = measured()
    results.failures["W2", "vllm"] = "the time was up"
    shape = SHAPES["125m"]
    text = report(results, shape, WORKLOADS, ROOFLINE, list(goals(results, shape, WORKLOADS, ROOFLINE, [])), {})
    assert "3 s, gap 10.00 ms (±50 %)" in text
    assert "410 tok/s, TTFT 0.50 s" in text
    assert "- vllm, W2: the time was up" in text
    assert len([line for line in text.splitlines() if line.startswith("| openvino")]) == 3


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(["a", "bb"], [["ccc", "d"]]) == "| a   | bb |\n| --- | -- |\n| ccc | d  |"


def test_the_plot_has_a_bar_for_each_ratio() -> None:
    picture = ElementTree.fromstring(svg([("125m W1", {OURS: 1.0, "a": 2.0, "b": None, "c": 0.4})], ["a", "b", "c"]))
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["a: 2.00", "c: 0.40"]


def test_every_token_has_a_text_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(32000)))
    read = Tokenizer.from_file(str(path))
    assert read.get_vocab_size() == 32000
    assert len({read.decode([token]) for token in range(300, 31998)}) == 31998 - 300
    assert read.decode([31999], skip_special_tokens=False) == "</s>"
    assert read.decode(read.encode("abc ü 😶").ids) == "abc ü 😶"
