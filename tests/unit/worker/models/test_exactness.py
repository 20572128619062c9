"""Greedy tokens and log probabilities equal transformers' for every architecture, whatever the batch and the chunks."""

import pytest

from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import ARCHITECTURES
from tests.unit.worker.driver import Driver, Tracked
from tests.unit.worker.models.reference import NUM_TOKENS, Reference, make_prompts, open_reference

CLOSE = {"abs": 1e-4}
"""Between log probabilities."""
ROUNDED: dict[str, dict[str, float]] = {
    "GptOssForCausalLM": {"abs": 1.5e-4, "rel": 2e-5},
    "Qwen3_5MoeForConditionalGeneration": {"abs": 1.5e-4, "rel": 2e-5},
}
"""Checkpoints whose log probabilities in float32 are 2e-4 to 5e-4 from those in float64: on CPUs where torch and the
kernels sum in other orders (AVX2 alone, AMD's AVX-512), they differ by 1.1e-4."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(tmp_path_factory.mktemp("checkpoint"), request.param)


def outputs_of(sequences: list[Tracked]) -> list[list[int]]:
    return [sequence.output for sequence in sequences]


def test_single_prompts_equal_transformers(reference: Reference) -> None:
    for prompt, output in zip(make_prompts(), reference.outputs, strict=True):
        assert reference.driver.generate([prompt], max_tokens=4)[0].output == output[:4]
    assert len(set(map(tuple, reference.outputs))) == len(reference.outputs), "degenerate checkpoint"


def test_a_batch_equals_transformers(reference: Reference) -> None:
    assert reference.together == reference.outputs


@pytest.mark.parametrize(("chunk", "budget"), [(7, 10_000), (16, 40), (10_000, 64)])
def test_chunked_prefill_equals_transformers(reference: Reference, chunk: int, budget: int) -> None:
    sequences = reference.driver.generate(make_prompts(), max_tokens=10, chunk=chunk, budget=budget)
    assert outputs_of(sequences) == [output[:10] for output in reference.outputs]


def test_a_resumed_request_continues_where_it_was(reference: Reference) -> None:
    known = [output[:10] for output in reference.outputs]
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, outputs=known)
    assert outputs_of(sequences) == reference.outputs


def test_logprobs_equal_transformers(reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=2)
    close = ROUNDED.get(reference.architecture, CLOSE)
    for sequence in reference.driver.generate(make_prompts(), params, max_tokens=8, chunk=100):
        expected = reference.logprobs(sequence.prompt + sequence.output)
        for index, (token_id, entries) in enumerate(zip(sequence.output, sequence.logprobs, strict=True)):
            row = expected[len(sequence.prompt) + index - 1]
            assert token_id in entries
            assert set(row.topk(5).indices.tolist()) == set(entries)
            for entry, logprob in entries.items():
                assert logprob == pytest.approx(float(row[entry]), **close)
        assert sequence.ranks == [1] * 8
        described = []
        for chunk in sequence.prompt_logprobs:
            columns, at = chunk.logprobs, 0
            for row, count in enumerate(columns.counts.tolist()):
                position = chunk.start + row
                described.append(position)
                assert int(columns.token_ids[at]) == sequence.prompt[position]
                for entry in range(at, at + count):
                    actual = float(expected[position - 1, int(columns.token_ids[entry])])
                    assert float(columns.logprobs[entry]) == pytest.approx(actual, **close)
                at += count
        assert described == list(range(1, len(sequence.prompt)))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(tmp_path_factory.mktemp("checkpoint"), "MistralForCausalLM")


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_the_block_size_changes_nothing(block_size: int, mistral: Reference) -> None:
    driver = Driver(mistral.directory, block_size=block_size, num_blocks=2000)
    assert outputs_of(driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=50)) == mistral.outputs


def test_with_every_kernel_on_the_tokens_are_the_same(reference: Reference) -> None:
    driver = Driver(reference.directory, reference_kernels=("none",))
    assert outputs_of(driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=100)) == reference.outputs
