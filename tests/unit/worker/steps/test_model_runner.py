"""The persistent batch over many steps: shared blocks, reuse of slots and blocks, faults of single sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda_common.config.model_files import resolve_model
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.layers import Linear
from pagoda_worker.steps.step import NewRequest, StepInput
from tests.unit.worker.driver import Driver

PROMPT = list(range(10, 43))  # 33 tokens: two full blocks and one token
STORIES = Path(__file__).parents[3] / "data" / "stories260K"


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver("pagoda-tiny")


def request(slot: int, prompt: list[int], blocks: list[int], computed: int = 0) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=np.array(prompt),
        sampling_params=SamplingParams(temperature=0, max_tokens=None),
        block_ids=np.array(blocks),
        num_computed_tokens=computed,
    )


def test_a_prefix_may_be_shared_with_a_sequence_that_fills_it_in_the_same_step() -> None:
    driver = Driver("pagoda-tiny", num_blocks=20)
    expected = driver.generate([PROMPT, [*PROMPT[:32], 99]], max_tokens=6)
    driver = Driver("pagoda-tiny", num_blocks=20)
    new = [request(0, PROMPT, [3, 4, 5]), request(1, [*PROMPT[:32], 99], [3, 4, 6], computed=32)]
    output = driver.execute(
        new_requests=new, num_seqs=2, slots=np.array([1, 0]), num_scheduled_tokens=np.array([1, 33])
    )
    rows = [output.token_ids[::-1]]
    rows += [driver.execute(num_seqs=2, slots=np.array([0, 1])).token_ids for _ in range(5)]
    assert np.stack(rows, axis=1).tolist() == [sequence.output for sequence in expected]


def test_slots_and_blocks_are_used_again_without_a_trace(driver: Driver) -> None:
    alone = driver.generate([PROMPT], max_tokens=12)[0].output
    rich = SamplingParams(
        temperature=1.0, seed=1, max_tokens=5, logit_bias={5: 3.0}, repetition_penalty=1.5, logprobs=2, min_tokens=4
    )
    driver.generate([[7] * 60, [8] * 200], rich, max_tokens=5)
    again = driver.generate([PROMPT], max_tokens=12)[0]
    assert again.output == alone
    assert again.logprobs == []


def test_seeded_samples_are_the_same_alone_in_a_batch_of_32_and_resumed(driver: Driver) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=seed, top_p=0.9, top_k=(0, 40)[seed % 2], max_tokens=12)
        for seed in range(32)
    ]
    prompts = [[20 + seed, *PROMPT[: 1 + seed]] for seed in range(32)]
    together = [sequence.output for sequence in driver.generate(prompts, params, max_tokens=12, chunk=10)]
    for seed in (0, 7, 31):
        assert driver.generate([prompts[seed]], [params[seed]], max_tokens=12)[0].output == together[seed]
        (resumed,) = driver.generate([prompts[seed]], [params[seed]], max_tokens=12, outputs=[together[seed][:5]])
        assert resumed.output == together[seed]


def test_penalties_and_min_tokens_continue_after_a_resume(driver: Driver) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=1.0, presence_penalty=0.5, min_tokens=15)
    (whole,) = driver.generate([PROMPT], params, max_tokens=20)
    (resumed,) = driver.generate([PROMPT], params, max_tokens=20, outputs=[whole.output[:9]])
    assert resumed.output == whole.output
    assert not {0, 2} & set(whole.output[:15]), "end tokens are masked before min_tokens"


def test_a_nan_ends_its_own_sequence_only_and_leaves_its_blocks_clean() -> None:
    driver = Driver("pagoda-tiny", num_blocks=6, max_num_seqs=4)
    model = driver.worker._model
    assert model is not None
    poisoned, healthy = 3000, [11, 12, 13]
    expected = driver.generate([healthy, [*healthy, 14]], max_tokens=20)
    with torch.no_grad():
        model.embed_tokens.weight[poisoned] = torch.nan
    # Tied weights: the poisoned row would make every logit row bad; the head gets a copy of its own.
    table = model.embed_tokens
    model.lm_head = Linear(in_features=table.columns, out_features=table.rows, bias=False)
    model.lm_head.weight = torch.nn.Parameter(table.weight.nan_to_num(), requires_grad=False)
    driver.worker.initialize_cache(num_blocks=6, num_cpu_blocks=0)  # with a runner that knows it
    sequences = driver.generate([healthy, [poisoned] * 20, [*healthy, 14]], max_tokens=20, slots=[0, 1, 2])
    assert sequences[1].bad is not None
    assert "no finite logits" in sequences[1].bad.message
    assert [sequences[0].output, sequences[2].output] == [sequence.output for sequence in expected]
    # The blocks go to others now; what is masked in them must be finite.
    again = driver.generate([healthy, [*healthy, 14]], max_tokens=20, slots=[1, 3])
    assert [sequence.output for sequence in again] == [sequence.output for sequence in expected]


def test_a_step_ahead_of_a_bad_slot_is_answered_bad_again(driver: Driver) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, allowed_token_ids=[5], bad_words_token_ids=[[5]])
    (blocks,) = driver.take_blocks(60, 2)
    new = NewRequest(
        slot=60, request_id="x", prompt_token_ids=np.array([1]), sampling_params=params, block_ids=np.array(blocks)
    )
    first = driver.execute(new_requests=[new], num_seqs=1, slots=np.array([60]))
    second = driver.execute(num_seqs=1)
    assert first.bad_slots == second.bad_slots
    assert first.bad_slots[0].slot == 60
    driver._to_free.append(60)
    assert driver.execute(num_seqs=1).bad_slots[0].message == "slot 60 is empty"


def test_more_tokens_than_known_or_than_blocks_hold_is_a_bad_slot(driver: Driver) -> None:
    new = [request(61, [1, 2, 3], [500]), request(62, PROMPT, [501])]
    output = driver.execute(
        new_requests=new, num_seqs=2, slots=np.array([61, 62]), num_scheduled_tokens=np.array([4, 33])
    )
    assert "do not fit 3 known tokens" in output.bad_slots[0].message
    assert "1 blocks of 16" in output.bad_slots[1].message
    driver._to_free += [61, 62]


def test_a_context_may_be_filled_to_its_last_token() -> None:
    driver = Driver("pagoda-tiny", max_model_len=40)
    (sequence,) = driver.generate([PROMPT], max_tokens=8)  # 33 + 8 tokens: the last one is only logged
    assert len(sequence.output) == 8
    output = driver.execute(num_seqs=0)
    assert output.token_ids.size == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.04)])
def test_16_bit_weights_and_cache_come_close_to_float32(driver: Driver, dtype: str, tolerance: float) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(of: Driver) -> np.ndarray:
        (sequence,) = of.generate([PROMPT * 3], params, max_tokens=1, chunk=40)
        return np.concatenate([chunk.logprobs.logprobs for chunk in sequence.prompt_logprobs])

    assert np.abs(logprobs(Driver("pagoda-tiny", dtype=dtype)) - logprobs(driver)).max() < tolerance


def test_the_real_stories_model_tells_its_story() -> None:
    from tokenizers import Tokenizer

    driver = Driver(STORIES)
    (sequence,) = driver.generate([[1]], max_tokens=160)
    text = Tokenizer.from_file(str(STORIES / "tokenizer.json")).decode(sequence.output)
    assert text.strip().startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the "
        "park.\" Lily was sad and didn't know what to do. She said,"
    )


def test_the_embedded_model_is_the_default() -> None:
    assert resolve_model("pagoda-tiny") == resolve_model(str(resolve_model("pagoda-tiny")))


def test_an_unknown_slot_fails_the_step() -> None:
    driver = Driver("pagoda-tiny", max_num_seqs=4)
    worker = driver.worker
    with pytest.raises(Exception, match="slot 9 is not below max_num_seqs"):
        worker.execute_model(StepInput(num_seqs=1, slots=np.array([9])))
