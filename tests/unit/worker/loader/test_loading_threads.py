"""While weights are read and packed, some cores are left to the threads that read."""

import pytest
import torch

from pagoda_worker.loader import weights
from tests.unit.worker.driver import Driver


@pytest.mark.parametrize(("before", "meanwhile"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_half_of_the_threads_compute_and_all_do_afterwards(
    before: int, meanwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with pytest.raises(ValueError, match="broken"), weights._half_of_threads():
        raise ValueError("broken")
    assert asked == [meanwhile, before]


def test_a_load_gives_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    whole = weights._index

    def index(*args: object) -> object:
        seen.append(torch.get_num_threads())
        return whole(*args)  # type: ignore[arg-type]  # as they came

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(weights, "_index", index)
    try:
        Driver("pagoda-tiny")
    finally:
        torch.set_num_threads(before)
    assert seen == [2]
