"""The persistent batch over many steps: shared blocks, reuse of slots and blocks, faults of single sequences."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.errors import Code
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.decoder.decoder_layers import DecoderLayers
from pagoda_worker.models.layers import Linear
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import NULL_BLOCK, NewRequest, StepInput
from pagoda_worker.steps.step_clock import StepClock
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


# What a step changes, by a runner of which only the parts in question are there.


class Noting:
    """Notes its calls, with arrays as lists; what is named at first it answers with that."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any) -> None:
            self.calls.append((name, *(arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args)))

        return note


def runner_of(**parts: Any) -> ModelRunner:
    runner = object.__new__(ModelRunner)
    runner.__dict__.update(parts)
    return runner


def batch_of(*slots: int, **more: Any) -> Any:
    """A batch of five slots with sequences in some."""
    is_in_use = np.isin(np.arange(5), slots)
    failed: list[tuple[Any, ...]] = []
    fields: dict[str, Any] = {"adapters": {}, "takes_drafts": np.ones(5, dtype=bool)}
    return SimpleNamespace(
        is_in_use=is_in_use,
        failed=failed,
        fail=lambda slot, code, text, field="": failed.append((slot, code, text, field)),
        sampling=SimpleNamespace(needs_log=np.zeros(5, dtype=bool)),
        **{**fields, **more},
    )


@pytest.mark.parametrize(
    ("step", "cleared"),
    [
        (StepInput(), []),
        (StepInput(appended_block_ids=np.array([5, NULL_BLOCK, 6])), [5, 6]),
        (StepInput(appended_block_ids=np.array([NULL_BLOCK])), []),
        (StepInput(appended_block_ids=np.array([19])), [19]),
        (StepInput(appended_block_ids=np.array([20])), []),
        (StepInput(new_requests=[request(0, PROMPT, [1, 2, 3], computed=16)]), [2, 3]),
        (StepInput(new_requests=[request(0, PROMPT, [1, 2, 3], computed=17)]), [3]),
        (
            StepInput(
                new_requests=[
                    replace(
                        request(0, PROMPT, [1, 2], computed=15),
                        group_block_ids=np.array([[NULL_BLOCK, 7], [8, 9]]),
                    )
                ]
            ),
            [2, 7, 9],
        ),
    ],
)
def test_blocks_that_will_be_filled_are_cleared_where_layers_have_windows(step: StepInput, cleared: list[int]) -> None:
    cache = Noting(block_size=16, num_blocks=20)
    runner_of(_kv_cache=cache)._clear_given(step)
    assert cache.calls == ([("clear", cleared)] if cleared else [])


def test_states_are_moved_then_begun_then_loaded() -> None:
    states, batch = Noting(), batch_of(0, 1, 2)
    new = [
        request(slot, PROMPT, [1], computed=computed) for slot, computed in ((0, 0), (1, 16), (2, 16), (3, 9), (7, 9))
    ]
    step = StepInput(
        new_requests=new,
        states_to_load=np.array([[4, 2]]),
        states_to_swap_out=np.array([[1, 0]]),
        states_to_swap_in=np.array([[0, 3]]),
        states_to_save=np.array([[2, 5]]),
    )
    runner = runner_of(input_batch=batch, _states=states)
    runner._apply_states(step, cast("Any", states))
    runner._save_states(step)
    assert states.calls == [
        ("swap_out", [[1, 0]]),
        ("swap_in", [[0, 3]]),
        ("begin", [0, 1, 2, 3]),
        ("load", [[4, 2]]),
        ("save", [[2, 5]]),
    ]
    message = "request r1: 16 tokens of it are computed, and no state comes with them"
    assert batch.failed == [(1, Code.INTERNAL, message, "")], "slot 2 has one, slot 3 no sequence"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_request_gets_the_adapter_of_its_number(is_enabled: bool) -> None:
    held = {3: "adapter"}
    adapters = Noting(
        get=held.get, on_device=lambda adapter: f"{adapter} there", remove=lambda number: held.pop(number)
    )
    held[9] = "removed"
    batch = batch_of(0, 1, 2)
    numbers = ((0, 3), (1, 0), (2, 9), (3, 3), (5, 3))
    new = [replace(request(slot, PROMPT, [1]), lora_number=number) for slot, number in numbers]
    runner = runner_of(input_batch=batch, _adapters=adapters if is_enabled else None)
    runner._update_adapters(StepInput(new_requests=new, loras_to_remove=np.array([9])))
    assert batch.adapters == ({0: "adapter there"} if is_enabled else {})
    missing = [(2, Code.INTERNAL, "request r2: adapter 9 is not loaded", "")]
    if not is_enabled:
        missing.insert(0, (0, Code.INTERNAL, "request r0: adapter 3 is not loaded", ""))
    assert batch.failed == missing


def test_processors_meet_new_requests_and_forget_those_that_left() -> None:
    processors = Noting(add=lambda slot, params: "it is wrong" if slot == 2 else None, has=lambda slot: slot == 0)
    batch = batch_of(0, 1, 2)
    new = [request(slot, PROMPT, [1]) for slot in (0, 1, 2, 3, 5)]
    runner_of(input_batch=batch, _processors=processors)._update_processors(
        StepInput(new_requests=new, freed_slots=np.array([4]))
    )
    assert processors.calls == [("remove", [slot]) for slot in (4, 0, 1, 2)]
    assert batch.failed == [(2, Code.INVALID_ARGUMENT, "it is wrong", "vllm_xargs")]
    assert batch.takes_drafts.tolist() == [False, True, True, True, True]
    assert batch.sampling.needs_log.tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("change", "is_decoded"),
    [
        ({}, True),
        ({"_is_alone": False}, False),
        ({"forward": SimpleNamespace(fused=None)}, False),
        ({"_processors": SimpleNamespace(is_empty=False)}, False),
        ({"_constraints": SimpleNamespace(is_empty=False)}, False),
        ({"input_batch": SimpleNamespace(decode=lambda step, layers: None)}, False),
    ],
)
def test_a_plain_step_is_one_call_where_no_one_has_a_say_in_its_tokens(
    change: dict[str, Any], is_decoded: bool
) -> None:
    layers = object.__new__(DecoderLayers)
    layers.has_ends = True
    parts: dict[str, Any] = {
        "forward": SimpleNamespace(fused=layers),
        "_is_alone": True,
        "_processors": SimpleNamespace(is_empty=True),
        "_constraints": SimpleNamespace(is_empty=True),
        "input_batch": SimpleNamespace(decode=lambda step, of: np.array([5]) if of is layers else None),
    }
    runner, clock = runner_of(**{**parts, **change}), StepClock(0)
    output = runner._decode(StepInput(num_seqs=1), clock)
    assert (output is not None) is is_decoded
    if output is not None:
        assert output.token_ids.tolist() == [5]
        assert output.timings.forward_ns > 0
    layers.has_ends = False
    assert runner._decode(StepInput(num_seqs=1), clock) is None
