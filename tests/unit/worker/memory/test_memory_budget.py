"""What an accelerator's memory is divided into, with made-up numbers."""

import pytest

from pagoda_worker.memory.profiling import MemoryBudget, bytes_of_graphs

GIB = 2**30


@pytest.mark.parametrize("utilization", [0.3, 0.5, 0.92, 1.0])
@pytest.mark.parametrize("total", [24 * GIB, 80 * GIB, 141 * GIB])
@pytest.mark.parametrize("others", [0, 2 * GIB])
def test_all_of_it_together_is_the_share_that_was_asked_for(utilization: float, total: int, others: int) -> None:
    weights, context, activations, graphs = 3 * GIB, 500_000_000, 1_234_567_890, 345_678_901
    budget = MemoryBudget(
        total_bytes=total,
        utilization=utilization,
        free_bytes=total - weights - context - others,
        activation_bytes=activations,
        graph_bytes=graphs,
    )
    block = 16 * 2 * 36 * 8 * 128 * 2
    cache = budget.kv_cache_bytes // block * block
    in_use = weights + context + others + activations + graphs + cache
    assert cache > 0
    assert in_use <= total * utilization + 1
    assert in_use / (total * utilization) == pytest.approx(1, abs=0.02)


def test_more_than_the_share_in_use_leaves_nothing() -> None:
    budget = MemoryBudget(total_bytes=10 * GIB, utilization=0.5, free_bytes=5 * GIB, activation_bytes=1)
    assert budget.kv_cache_bytes == 0


def test_graphs_are_told_by_the_two_largest() -> None:
    """The first one takes 700 for all, and each takes 9 for itself."""
    free, recorded = [10_000], list[int]()

    def record(size: int) -> None:
        free[0] -= 9 if recorded else 700 + 9
        recorded.append(size)

    assert bytes_of_graphs([1, 2, 4, 8, 16], record, lambda: free[0]) == 700 + 5 * 9
    assert recorded == [16, 8]


def test_memory_that_others_give_back_meanwhile_is_no_cost() -> None:
    free = iter([100, 90, 95])
    assert bytes_of_graphs([1, 2, 4], lambda size: None, lambda: next(free)) == 10
    assert bytes_of_graphs([1], lambda size: None, lambda: 5) == 0
