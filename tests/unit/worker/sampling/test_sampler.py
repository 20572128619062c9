"""The sampler on plain logits: every parameter does what it says, to its own row only."""

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.sampling.logits_processors import LogitsProcessor, LogitsProcessors
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.sampling.sampler import BAD_TOKEN, NO_TOKEN, Sampler, SamplerOutput
from pagoda_worker.sampling.sampling_columns import SamplingColumns
from pagoda_worker.sampling.structured import TokenMask

VOCAB_SIZE = 50


class Rows:
    """A few slots with prompt and output, and logits to sample from."""

    def __init__(self, num_slots: int = 8) -> None:
        self.columns = SamplingColumns(max_num_seqs=num_slots, vocab_size=VOCAB_SIZE)
        self.sampler = Sampler(columns=self.columns)
        self.accelerated = Sampler(columns=self.columns, never_waits=True)
        """As on an accelerator."""
        self.tokens = np.zeros((num_slots, 64), dtype=np.int32)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)

    def put(
        self,
        slot: int,
        *,
        prompt: tuple[int, ...] = (1,),
        output: tuple[int, ...] = (),
        eos: tuple[int, ...] = (),
        **params: Any,
    ) -> None:
        log = (*prompt, *output)
        self.tokens[slot, : len(log)] = log
        self.num_prompt[slot], self.num_tokens[slot] = len(prompt), len(log)
        self.columns.clear(slot)
        self.columns.set(slot, SamplingParams(**({"temperature": 0, "max_tokens": None} | params)), eos)

    def batch(self, slots: list[int]) -> LogitsBatch:
        rows = np.array(slots)
        return LogitsBatch(
            slots=rows,
            tokens=self.tokens,
            num_prompt_tokens=self.num_prompt[rows],
            num_tokens=self.num_tokens[rows],
        )

    def sample(self, logits: torch.Tensor, slots: list[int]) -> SamplerOutput:
        before = logits.clone()
        output = self.sampler.sample(logits, self.batch(slots))
        other = self.accelerated.sample(logits, self.batch(slots))
        assert (other.token_ids.tolist(), other.is_bad.tolist()) == (output.token_ids.tolist(), output.is_bad.tolist())
        if not self.columns.needs_log[slots].any():
            launched = self.sampler.launch(logits, self.batch(slots)).numpy()
            assert (launched < 0).tolist() == output.is_bad.tolist()
            assert np.maximum(launched, 0).tolist() == output.token_ids.tolist()
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logprobs are taken from these logits afterwards"
        return output

    def one(self, logits: torch.Tensor, slot: int = 0) -> int:
        return int(self.sample(logits[None], [slot]).token_ids[0])


def falling() -> torch.Tensor:
    """Token 0 is the likeliest, then 1, 2, …"""
    return -torch.arange(VOCAB_SIZE, dtype=torch.float32) / 4


def test_greedy_takes_the_likeliest_and_the_lower_id_of_equals() -> None:
    rows = Rows()
    rows.put(0)
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 9]] = 1.0
    assert rows.one(logits) == 7


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    everything: dict[int, dict[str, Any]] = {
        0: {},
        1: {"temperature": 1.0, "seed": 3},
        2: {"temperature": 0.5, "seed": 4, "top_p": 0.5, "top_k": 3},
        3: {"allowed_token_ids": (20, 30)},
        4: {"logit_bias": {40: 100.0}},
        5: {"min_tokens": 3, "eos": (0,), "stop_token_ids": (1,)},
        6: {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0, "output": (0, 0, 1)},
        7: {"bad_words_token_ids": ((0,), (5, 1)), "output": (5,)},
    }
    rows = Rows()
    for slot, params in everything.items():
        rows.put(slot, **params)
    logits = falling().repeat(8, 1)
    together = rows.sample(logits, list(range(8))).token_ids.tolist()
    assert together == [rows.one(falling(), slot) for slot in range(8)]
    assert together[0] == 0
    assert together[3:] == [20, 40, 2, 2, 2]
    order = [6, 2, 0, 7, 1, 5, 4, 3]
    assert rows.sample(logits, order).token_ids.tolist() == [together[slot] for slot in order]


def test_a_launched_row_without_a_token_says_whose_fault_it_is() -> None:
    rows = Rows()
    rows.put(0)
    rows.put(1, allowed_token_ids=(2,), min_tokens=3, eos=(2,))
    rows.put(2, logit_bias={3: 1.0}, temperature=1.0, seed=1)
    rows.put(3, allowed_token_ids=(2,), min_tokens=3, eos=(2,))
    logits = falling().repeat(4, 1)
    logits[2, 30] = torch.nan
    logits[3, 30] = torch.inf
    assert rows.sampler.launch(logits, rows.batch([0, 1, 2, 3])).tolist() == [0, NO_TOKEN, BAD_TOKEN, BAD_TOKEN]
    assert rows.sample(logits, [0, 1, 2, 3]).is_bad.tolist() == [False, True, True, True]


def test_a_seeded_row_draws_the_same_alone_and_in_a_batch_of_32() -> None:
    rows = Rows(32)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(32, VOCAB_SIZE, generator=generator)
    for slot in range(32):
        rows.put(slot, temperature=0.9, seed=slot % 5, top_p=(1.0, 0.8)[slot % 2], top_k=(0, 7, 20)[slot % 3])
    together = rows.sample(logits, list(range(32))).token_ids.tolist()
    assert together == [rows.one(logits[slot], slot) for slot in range(32)]


def test_the_offset_decides_the_draw_not_the_length_of_the_prompt() -> None:
    rows, logits = Rows(), torch.zeros(VOCAB_SIZE)
    rows.put(0, temperature=1.0, seed=5, prompt=(1, 2, 3), output=(4,))
    rows.put(1, temperature=1.0, seed=5, prompt=(9,), output=(8,))
    assert rows.one(logits, 0) == rows.one(logits, 1)
    draws = set()
    for length in range(40):
        rows.put(2, temperature=1.0, seed=5, output=(0,) * length)
        draws.add(rows.one(logits, 2))
    assert len(draws) > 20


def test_seeds_use_all_64_bits() -> None:
    rows, logits = Rows(), torch.zeros(VOCAB_SIZE)
    drawn = []
    for seed in (1, 1 + 2**32, 2**63, 2**64 - 1):
        draws = []
        for length in range(6):
            rows.put(0, temperature=1.0, seed=seed, output=(0,) * length)
            draws.append(rows.one(logits))
        drawn.append(tuple(draws))
    assert len(set(drawn)) == 4


def test_a_low_temperature_approaches_greedy_and_top_k_1_is_greedy() -> None:
    rows, logits = Rows(), torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        rows.put(0, temperature=0.01, seed=seed)
        rows.put(1, temperature=2.0, top_k=1, seed=seed)
        rows.put(2, temperature=2.0, min_p=1.0, seed=seed)
        rows.put(3, temperature=2.0, top_p=1e-6, seed=seed)
        assert rows.sample(logits.repeat(4, 1), [0, 1, 2, 3]).token_ids.tolist() == [int(logits.argmax())] * 4


def test_min_tokens_masks_end_and_stop_tokens_until_they_are_there() -> None:
    rows = Rows()
    expected = {0: 2, 1: 2, 2: 0, 3: 0}
    for length, token in expected.items():
        rows.put(0, min_tokens=2, eos=(0,), stop_token_ids=(1,), output=(5,) * length)
        assert rows.one(falling()) == token


@pytest.mark.parametrize(
    ("output", "token"),
    [((), 1), ((5,), 1), ((5, 6), 2), ((9, 5, 6), 2), ((6, 5), 1), ((5, 6, 9), 1)],
)
def test_a_bad_word_is_masked_where_it_would_be_completed(output: tuple[int, ...], token: int) -> None:
    rows = Rows()
    rows.put(1, bad_words_token_ids=((3, 3, 3, 3),))  # a longer one moves the padding of the others
    rows.put(0, prompt=(5, 6), output=output, bad_words_token_ids=((0,), (5, 6, 1)))
    rows.put(2, bad_words_token_ids=((3, 3, 3, 3, 3),))
    assert rows.one(falling()) == token


def test_parameters_are_forgotten_with_the_sequence() -> None:
    rows = Rows()
    rows.put(
        0,
        logit_bias={40: 100.0},
        bad_words_token_ids=((40,),),
        repetition_penalty=2.0,
        allowed_token_ids=(40, 41),
        min_tokens=2,
        eos=(0,),
    )
    assert rows.one(falling()) == 41
    rows.columns.clear(0)
    rows.put(1, logit_bias={5: 100.0})
    assert rows.sample(falling().repeat(2, 1), [0, 1]).token_ids.tolist() == [0, 5]
    rows.put(0)
    assert rows.one(falling()) == 0
    rows.put(0, logit_bias={30: 100.0})
    assert rows.one(falling()) == 30


@pytest.mark.parametrize(
    ("long", "short", "tokens"),
    [
        ({"allowed_token_ids": (7, 8, 9)}, {"allowed_token_ids": (20,)}, [7, 20]),
        ({"min_tokens": 3, "eos": (1, 2, 3)}, {"min_tokens": 3, "eos": (1,)}, [0, 0]),
    ],
)
def test_lists_of_different_lengths_in_one_batch_name_their_own_tokens_only(
    long: dict[str, Any], short: dict[str, Any], tokens: list[int]
) -> None:
    rows = Rows()
    rows.put(0, **long)
    rows.put(1, **short)
    assert rows.sample(falling().repeat(2, 1), [0, 1]).token_ids.tolist() == tokens


def test_token_ids_outside_of_the_vocabulary_are_left_out() -> None:
    rows = Rows()
    rows.put(
        0,
        logit_bias={VOCAB_SIZE: 100.0, 3: 50.0},
        allowed_token_ids=(3, 4, 2**31),
        bad_words_token_ids=((VOCAB_SIZE,), (3, VOCAB_SIZE)),
        min_tokens=1,
        eos=(VOCAB_SIZE + 7,),
    )
    assert rows.one(falling()) == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_unusable_row_is_reported_and_spares_the_others(bad: float) -> None:
    rows = Rows()
    for slot in range(3):
        rows.put(slot, temperature=0.8, seed=slot)
    logits = falling().repeat(3, 1)
    clean = rows.sample(logits, [0, 1, 2]).token_ids
    logits[1, 17] = bad
    output = rows.sample(logits, [0, 1, 2])
    assert output.is_bad.tolist() == [False, True, False]
    assert output.token_ids[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_a_row_without_any_token_left_is_reported() -> None:
    rows = Rows()
    rows.put(0, allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    assert rows.sample(falling()[None], [0]).is_bad.tolist() == [True]


def test_counts_kept_from_step_to_step_equal_counts_made_anew() -> None:
    generator = np.random.default_rng(4)
    rows = Rows(6)
    logs: dict[int, tuple[list[int], list[int]]] = {}
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    for step in range(150):
        for slot in range(6):
            if slot not in logs or generator.random() < 0.15:  # a sequence leaves, the next one enters
                prompt = generator.integers(0, VOCAB_SIZE, generator.integers(1, 9)).tolist()
                logs[slot] = (prompt, generator.integers(0, VOCAB_SIZE, generator.integers(0, 3)).tolist())
                params: dict[str, Any] = {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": 0.3}
                if slot == 5:
                    params = {"logit_bias": {int(generator.integers(VOCAB_SIZE)): 5.0}}
                rows.put(slot, prompt=tuple(prompt), output=tuple(logs[slot][1]), temperature=0.7, seed=step, **params)
        slots = generator.permutation(6)[: generator.integers(1, 7)].tolist()  # some wait, as after a preemption
        kept = rows.sample(logits[slots], slots).token_ids
        rows.sampler = Sampler(columns=rows.columns) if step % 20 == 19 else rows.sampler
        fresh = Sampler(columns=rows.columns).sample(logits[slots], rows.batch(slots)).token_ids
        assert kept.tolist() == fresh.tolist()
        for slot, token in zip(slots, kept.tolist(), strict=True):
            if rows.num_tokens[slot] < rows.tokens.shape[1]:
                rows.tokens[slot, rows.num_tokens[slot]] = token
                rows.num_tokens[slot] += 1


def test_a_step_of_the_sampler_runs_no_python_for_each_row() -> None:
    """As many lines of Python for 64 rows as for 4, with every parameter in use."""
    params: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 1,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": tuple(range(40)),
        "bad_words_token_ids": ((7,), (5, 6)),
        "min_tokens": 9,
        "eos": (0,),
    }
    num_lines = []
    for num_rows in (4, 64):
        rows = Rows(num_rows)
        for slot in range(num_rows):
            rows.put(slot, output=(5,), **params)
        logits, slots = torch.randn(num_rows, VOCAB_SIZE), list(range(num_rows))
        rows.sample(logits, slots)
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            if "pagoda_" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            rows.sampler.sample(logits, rows.batch(slots))
        finally:
            sys.settrace(None)
        num_lines.append(count)
    assert num_lines[0] == num_lines[1] > 50


class Reversed(LogitsProcessor):
    """Turns the order of the logits round."""

    def is_needed(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return -logits


def test_the_likeliest_tokens_that_are_known_count_for_unchanged_logits_alone() -> None:
    rows, logits = Rows(), falling().repeat(2, 1)
    rows.put(0)
    rows.put(1)
    batch, known = rows.batch([0, 1]), (torch.zeros(2), torch.tensor([7, 9]))
    samplers = rows.sampler, rows.accelerated
    for sampler in samplers:
        assert sampler.sample(logits, batch, likeliest=known).token_ids.tolist() == [7, 9], "they are not looked for"
        mask = TokenMask(rows=np.array([1]), bits=np.array([[8] + [0] * 6], np.uint8), is_beam=np.array([False]))
        assert sampler.sample(logits, batch, likeliest=known, token_mask=mask).token_ids.tolist() == [0, 3]
    assert rows.sampler.launch(logits, batch, likeliest=known).tolist() == [7, 9]
    processors = LogitsProcessors([Reversed(vocab_size=VOCAB_SIZE, device=torch.device("cpu"))])
    processors.add(1, SamplingParams())
    processed = Sampler(columns=rows.columns, processors=processors)
    assert processed.sample(logits, batch, likeliest=known).token_ids.tolist() == [0, VOCAB_SIZE - 1]
    rows.put(1, logit_bias={40: 100.0})
    for sampler in samplers:
        assert sampler.sample(logits, batch, likeliest=known).token_ids.tolist() == [0, 40]
    assert rows.sampler.launch(logits, batch, likeliest=known).tolist() == [0, 40]


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_the_logits_that_were_sampled_from_are_given_where_they_are_asked_for(is_accelerated: bool) -> None:
    rows, logits = Rows(), falling().repeat(3, 1)
    rows.put(0)
    rows.put(1, logit_bias={40: 100.0})
    rows.put(2, temperature=0.5, seed=1, top_k=2)
    sampler, batch = rows.accelerated if is_accelerated else rows.sampler, rows.batch([0, 1, 2])
    assert sampler.sample(logits, batch).processed is None
    processed = sampler.sample(logits, batch, keep_processed=True).processed
    assert processed is not None
    assert torch.equal(processed[0], logits[0])
    assert (float(processed[1, 40]), float(processed[1, 1])) == (90.0, -0.25)
    assert processed[2, :3].tolist() == [0, -0.5, -torch.inf]
    greedy = sampler.sample(logits[:1], rows.batch([0]), keep_processed=True).processed
    assert greedy is not None
    assert torch.equal(greedy, logits[:1])
