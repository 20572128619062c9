"""What layers keep of a sequence, and how groups of them share buffers."""

from pathlib import Path

import pytest

from pagoda_common.errors import ConfigError, StaleEpoch
from pagoda_worker.models.cache_groups import CacheGroup, CacheLayout, group_size, groups_by_window, make_layout
from pagoda_worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver

WINDOWS = [8, 8, None, 8, 8, None, 8]


def layout_of(windows: list[int | None], *, max_model_len: int = 100, knows_groups: bool = True) -> CacheLayout:
    return make_layout(groups_by_window(windows), max_model_len=max_model_len, knows_groups=knows_groups)


def test_layers_of_a_kind_are_put_into_groups_of_one_size() -> None:
    layout = layout_of(WINDOWS)
    assert [(group.kind, group.layers) for group in layout.groups] == [
        ("full", (2, 5)),
        ("window", (0, 1)),
        ("window", (3, 4)),
        ("window", (6,)),
    ]
    assert len(layout.buffers) == 2
    assert layout.places[5] == (0, 1)
    assert layout.places[4] == (2, 1)
    assert layout.has_windows
    assert not layout.is_plain


@pytest.mark.parametrize("options", [{"max_model_len": 8}, {"knows_groups": False}])
def test_a_window_that_hides_nothing_or_that_no_one_asks_for_is_none(options: dict[str, int]) -> None:
    layout = layout_of(WINDOWS, **options)  # type: ignore[arg-type]
    assert layout.is_plain
    assert layout.groups[0].layers == tuple(range(7))


@pytest.mark.parametrize(
    ("num_full", "others", "size"),
    [
        (4, [22], 4),
        (5, [21], 5),
        (12, [12], 12),
        (13, [12], 13),
        (0, [16], 16),
        (10, [52], 10),
        (1, [5], 1),
    ],
)
def test_groups_leave_few_places_empty(num_full: int, others: list[int], size: int) -> None:
    assert group_size(num_full=num_full, num_others=others) == size


def test_recurrent_layers_need_a_scheduler_that_knows_them() -> None:
    declared = (CacheGroup("full", (0,)), CacheGroup("recurrent", (0, 1, 2)))
    layout = make_layout(declared, max_model_len=10, knows_groups=True)
    assert layout.recurrent == (0, 1, 2)
    assert [group.kind for group in layout.all_groups] == ["full", "recurrent"]
    with pytest.raises(ConfigError, match="recurrent state"):
        make_layout(declared, max_model_len=10, knows_groups=False)


def test_a_model_that_keeps_nothing_needs_one_that_knows_that() -> None:
    declared = (CacheGroup("none", (0, 1)),)
    layout = make_layout(declared, max_model_len=10, knows_groups=True)
    assert (layout.groups, layout.recurrent, layout.uncached) == ((), (), (0, 1))
    with pytest.raises(ConfigError, match="keeps no cache, which this scheduler does not know: upgrade") as error:
        make_layout(declared, max_model_len=10, knows_groups=False)
    assert error.value.field == "takes_cache_groups"


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (20, 5), (24, 6), (25, 7), (100, 7)])
def test_a_window_bounds_the_blocks_of_a_sequence(num_tokens: int, num_blocks: int) -> None:
    group = CacheGroup("window", (0,), 16)
    assert group.num_blocks(num_tokens, block_size=4, chunk=8) == num_blocks


def test_a_model_that_the_scheduler_does_not_know_is_not_kept(tmp_path: Path) -> None:
    directory, worker = make_checkpoint("Qwen3NextForCausalLM", tmp_path), Worker(num_threads=1)
    with pytest.raises(ConfigError, match="upgrade the scheduler"):
        Driver(directory, worker=worker, by_groups=False)
    assert worker.state == "device"
    with pytest.raises(StaleEpoch):
        _ = worker.cache_layout
    assert Driver(directory, worker=worker).generate([[1, 2, 3]], max_tokens=4)[0].output
