"""Which steps tell what a prompt token costs: those with enough tokens, drafts included."""

import pytest

from pagoda_scheduler.core.step import ModelRunnerOutput, StepTimings
from tests.unit.scheduler.stories import make_request, make_scheduler


@pytest.mark.parametrize(("num_drafts", "is_cheaper"), [(7, False), (6, True)])
def test_draft_tokens_count_as_tokens_of_a_step(num_drafts: int, is_cheaper: bool) -> None:
    scheduler = make_scheduler(
        num_host_blocks=8, swap_block_ns=1_000, num_speculative_tokens=7, max_num_batched_tokens=256
    )
    requests = [make_request(f"r{number}", [number] * 3, max_tokens=40, ignore_eos=True) for number in range(8)]
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(ModelRunnerOutput(first.step, None, [1] * 8))
    second = scheduler.schedule()
    assert second is not None
    assert second.num_lookahead_tokens == [7] * 8
    # 8 sequences with 7 drafts each are 64 tokens, the least that tells something: these were computed in no time.
    output = ModelRunnerOutput(
        second.step, None, [1] * 8, num_draft_tokens=[num_drafts] * 8, timings=StepTimings(forward_ns=64)
    )
    scheduler.update(output)
    assert scheduler.kv.is_swap_cheaper is is_cheaper
