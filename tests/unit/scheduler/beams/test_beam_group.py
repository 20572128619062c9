"""The beams that run for one request: a search that begins again after a loss has nothing of the one before."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.beams.beam_search import BeamSearch
from pagoda_scheduler.beams.running_beams import Beams
from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult
from tests.unit.scheduler.stories import make_request


def rows(count: int, row: int = 0) -> LogprobRows:
    """One row of log probabilities, the sampled token first and again."""
    ids = np.arange(10, 10 + count, dtype=np.uint32)
    return LogprobRows(
        rows=np.array([row], dtype=np.uint32),
        counts=np.array([count + 1], dtype=np.uint32),
        token_ids=np.concatenate([ids[:1], ids]),
        logprobs=np.linspace(-1, -2, count + 1, dtype=np.float32),
        sampled_ranks=np.ones(1, dtype=np.uint32),
    )


def test_candidates_of_a_search_that_was_lost_count_for_nothing() -> None:
    first = make_request("a", 4, max_tokens=4, ignore_eos=True)
    search = BeamSearch(beam_width=2, max_tokens=4, end_token_ids=frozenset())
    group = BeamGroup(sequences=[first], search=search)
    beam = group.start()
    assert group.collect(beam, rows(4), 0)
    continuations = group.advance()
    assert len(continuations) == 2
    group.beams = [beam, beam.derive(sampling_params=beam.sampling_params, output_token_ids=[10])]
    assert not group.collect(beam, rows(4), 0), "its sibling has given none"
    again = group.start()
    assert (group.beams, again.output_token_ids) == ([again], [])
    assert group.collect(again, rows(4), 0)
    assert len(group.advance()) == 2


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_of_all_beams_clears_the_sequences_of_the_client(is_last: bool) -> None:
    """They are what a loss of the worker counts against."""
    first = make_request("a", 4, max_tokens=4, ignore_eos=True)
    second = make_request("a", 4, max_tokens=4, ignore_eos=True, index=1)
    search = BeamSearch(beam_width=2, max_tokens=4, end_token_ids=frozenset())
    group = BeamGroup(sequences=[first, second], search=search)
    beam = group.start()
    sibling = beam.derive(sampling_params=beam.sampling_params, output_token_ids=[10])
    if not is_last:
        group.beams = [beam, sibling]
    first.num_crashes = second.num_crashes = 1
    nothing = SimpleNamespace(has_free=False)
    beams = Beams(
        kv=nothing,  # type: ignore[arg-type]  # waiting beams have no blocks
        slots=nothing,  # type: ignore[arg-type]  # nor slots
        running=[],
        wait=lambda request: None,
        preempt=lambda request: None,
        finish=lambda request: None,
    )
    beams.advance(beam, 10, 0, rows(4), StepResult(step=1))
    cleared = 0 if is_last else 1
    assert (first.num_crashes, second.num_crashes) == (cleared, cleared)
    assert beam.waits_for_siblings is not is_last
