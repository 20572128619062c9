"""Logits processors, and the rows of device state that slots share over time."""

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code, ConfigError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker import worker as worker_module
from pagoda_worker.sampling import logits_processors
from pagoda_worker.sampling.logits_processors import LogitsProcessor, LogitsProcessors, load_logits_processors
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.sampling.slot_rows import SlotRows
from tests.unit.worker.driver import Driver

PROMPT = [5, 6, 7]
EXAMPLE = "examples.logits_processor:OnlyThisToken"
CPU = torch.device("cpu")


class Recorder(LogitsProcessor):
    """Remembers what it was told, and raises when it is asked to."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size=vocab_size, device=device)
        self.told: list[tuple[list[int], list[int]]] = []
        self.seen: list[list[int]] = []

    def update_state(self, *, added: Any, removed: Any) -> None:
        self.told.append((list(added), list(removed)))

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        self.seen.append(batch.slots.tolist())
        if batch.tokens[batch.slots[0], 0] == 13:
            raise RuntimeError("a bug of the processor")
        return logits.zero_()


def batch_of(slots: list[int], first_token: int = 1) -> LogitsBatch:
    ones = np.ones(len(slots), dtype=np.int64)
    tokens = np.full((10, 4), first_token, dtype=np.int32)
    return LogitsBatch(slots=np.array(slots), tokens=tokens, num_prompt_tokens=ones, num_tokens=ones)


def asking(**extra_args: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=None, extra_args=extra_args or None)


def test_a_processor_meets_only_the_rows_that_ask_for_it() -> None:
    recorder = Recorder(vocab_size=6, device=CPU)
    processors = LogitsProcessors([recorder])
    logits = torch.randn(3, 6)
    assert processors.apply(logits, batch_of([4, 0, 9])) is logits
    for slot, params in ((4, asking()), (0, asking(x=1)), (9, asking(x=2))):
        assert processors.add(slot, params) is None
    changed = processors.apply(logits, batch_of([4, 0, 9]))
    assert recorder.seen == [[0, 9]]
    assert torch.equal(changed[0], logits[0])
    assert not changed[1:].any()
    assert logits[1:].all(), "the logits that were given are not changed"
    processors.remove(np.array([4, 0, 7, 9_999]))
    processors.apply(logits, batch_of([4, 0, 9]))
    assert recorder.seen[1:] == [[9]]
    assert recorder.told == [([0], []), ([9], []), ([], [0])]


def test_a_processor_that_fails_ends_its_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    processors = LogitsProcessors([Recorder(vocab_size=6, device=CPU)])
    processors.add(1, asking(x=1))
    logits = torch.randn(2, 6)
    changed = processors.apply(logits, batch_of([0, 1], first_token=13))
    assert torch.equal(changed[0], logits[0])
    assert changed[1].isnan().all()
    assert "a bug of the processor" in caplog.text


def test_the_runner_asks_processors_and_refuses_wrong_arguments() -> None:
    driver = Driver("pagoda-tiny", logits_processors=(EXAMPLE,))
    params = [asking(), asking(only_token_id=77), asking(only_token_id="x"), asking(other=1)]
    plain, forced, wrong, other = driver.generate([PROMPT] * 4, params, max_tokens=4)
    assert forced.output == [77] * 4
    assert other.output == plain.output != [77] * 4
    assert wrong.bad is not None
    assert wrong.bad.code is Code.INVALID_ARGUMENT
    assert "only_token_id must be a token id below" in wrong.bad.message
    again = driver.generate([PROMPT] * 3, [asking(only_token_id=78), asking(), asking(only_token_id=9)], max_tokens=2)
    assert [sequence.output for sequence in again] == [[78] * 2, plain.output[:2], [9] * 2]


def test_masks_hold_whatever_a_processor_does() -> None:
    driver = Driver("pagoda-tiny", logits_processors=(EXAMPLE,))
    params = SamplingParams(
        temperature=0, max_tokens=None, extra_args={"only_token_id": 77}, bad_words_token_ids=((77,),)
    )
    [sequence] = driver.generate([PROMPT], params)
    assert sequence.bad is not None
    assert "leave no token" in sequence.bad.message


def test_an_installed_processor_needs_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [EntryPoint(name="only", value=EXAMPLE, group="pagoda.logits_processors")]
    monkeypatch.setattr(logits_processors, "entry_points", lambda *, group: [e for e in installed if e.group == group])
    loaded = load_logits_processors([], vocab_size=90, device=CPU)
    assert loaded.add(0, asking(only_token_id=90)) == "vllm_xargs: only_token_id must be a token id below 90, got 90"
    assert loaded.add(0, asking(only_token_id=5)) is None
    assert int(loaded.apply(torch.randn(1, 90), batch_of([0])).argmax()) == 5


@pytest.mark.parametrize("name", ["no.such.module:X", "examples.logits_processor:Missing", "builtins:dict"])
def test_what_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        load_logits_processors([name], vocab_size=5, device=CPU)
    assert caught.value.field == "logits_processors"


def test_a_row_is_used_again_once_its_slot_holds_another_sequence() -> None:
    generations = np.zeros(6, dtype=np.int64)
    rows = SlotRows(generations)
    first, is_new = rows.take(np.array([5, 2]))
    assert is_new.tolist() == [True, True]
    assert sorted(first.tolist()) == [0, 1]
    again, is_new = rows.take(np.array([2, 5]))
    assert again.tolist() == first[::-1].tolist()
    assert not is_new.any()
    generations[5] += 1
    third, is_new = rows.take(np.array([2, 0]))
    assert third.tolist() == [first[1], first[0]]
    assert is_new.tolist() == [False, True]
    everything, is_new = rows.take(np.arange(6))
    assert sorted(everything.tolist()) == list(range(6))
    assert is_new.tolist() == [False, True, False, True, True, True]
    assert rows.size == 6


def test_a_row_that_went_to_another_slot_is_not_taken_for_ones_own() -> None:
    generations = np.zeros(3, dtype=np.int64)
    rows = SlotRows(generations)
    rows.take(np.array([0]))
    generations[:] = 1
    [row], _ = rows.take(np.array([2]))
    assert row == 0
    [own], [is_new] = rows.take(np.array([0]))
    assert (own, is_new) == (1, True)
    assert rows.take(np.array([2, 0]))[0].tolist() == [0, 1]


class ForAll(Recorder):
    """Wants every sequence, and leaves its logits as they are."""

    def is_needed(self, params: SamplingParams) -> bool:
        return True

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits


LOOP = [5, 6, 5, 6, 5, 6, 5, 6]


def driver_with(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(worker_module, "load_logits_processors", lambda *_, **__: LogitsProcessors([recorder]))
    return Driver("pagoda-tiny", speculative=SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_min=1))


def test_a_processor_hears_of_what_leaves_a_slot_and_of_what_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(vocab_size=512, device=CPU)
    driver = driver_with(recorder, monkeypatch)
    driver.generate([LOOP, PROMPT], [asking(x=1), asking()], max_tokens=2)
    assert recorder.told == [([0], [])]
    driver.generate([LOOP], [asking()], max_tokens=2, slots=[1])
    assert recorder.told[1:] == [([], [0])], "with the next step, though nothing takes its place"
    driver.generate([LOOP], [asking(x=2)], max_tokens=2)
    assert recorder.told[2:] == [([0], [])]
    driver._to_free.clear()  # a slot that is given to another sequence is free by that
    driver.generate([PROMPT], [asking(x=3)], max_tokens=2)
    assert recorder.told[3:] == [([], [0]), ([0], [])], "gone before the next one comes"


def test_what_a_processor_wants_has_no_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    for recorder, guesses in (
        (Recorder(vocab_size=512, device=CPU), True),
        (ForAll(vocab_size=512, device=CPU), False),
    ):
        driver = driver_with(recorder, monkeypatch)
        driver.generate([LOOP], [asking()], max_tokens=12)
        assert (driver.num_draft_tokens > 0) is guesses


class Picky(LogitsProcessor):
    """Wants the sequences that name it, and gives each of its logits its number."""

    def __init__(self, name: str, number: float) -> None:
        super().__init__(vocab_size=6, device=CPU)
        self.name = name
        self.number = number

    def is_needed(self, params: SamplingParams) -> bool:
        return self.name in (params.extra_args or {})

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits.double() + self.number


def test_each_of_several_processors_meets_its_own_rows_in_their_order() -> None:
    processors = LogitsProcessors([Picky("a", 1), Picky("b", 10)])
    assert not processors.is_empty
    for slot, args in ((3, {"a": 1}), (1, {"b": 1}), (2, {"a": 1, "b": 1})):
        assert processors.add(slot, asking(**args)) is None
    assert [processors.has(slot) for slot in range(6)] == [False, True, True, True, False, False]
    changed = processors.apply(torch.zeros(4, 6), batch_of([0, 1, 2, 3]))
    assert (changed[:, 0].tolist(), changed.dtype) == ([0, 10, 11, 1], torch.float32)
    processors.remove(np.array([2]))
    assert processors.apply(torch.zeros(2, 6), batch_of([2, 1]))[:, 0].tolist() == [0, 10]


class Failing(Picky):
    """Fails when it hears of sequences, and gives logits of another shape."""

    def update_state(self, *, added: Any, removed: Any) -> None:
        raise KeyError("added" if added else "removed")

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits[:, 1:]


def test_a_processor_that_fails_to_hear_of_a_sequence_ends_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    other = Picky("a", 1)
    processors = LogitsProcessors([Failing("a", 1), other])
    assert processors.add(0, asking(a=1)) == "vllm_xargs: KeyError('added')"
    assert "logits processor Failing failed" in caplog.text
    processors.add(1, asking(b=1))
    changed = processors.apply(torch.zeros(2, 6), batch_of([0, 1]))
    assert changed[0].isnan().all()
    assert not changed[1].any()
    assert "it gave logits of shape (1, 5) for (1, 6)" in caplog.text
    caplog.clear()
    processors.remove(np.array([0]))
    assert "logits processor Failing failed" in caplog.text
    assert not processors.has(0)
