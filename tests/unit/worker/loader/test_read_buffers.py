"""Memory of what was read is used again, and no more than some of it is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_worker.loader.read_buffers import MAX_KEPT_BYTES, ReadBuffers
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver


def test_memory_that_came_back_is_used_again() -> None:
    buffers = ReadBuffers()
    first, second = buffers.take(1 << 20), buffers.take(1 << 20)
    place = first.data_ptr()
    assert second.data_ptr() != place
    buffers.give_back(first.view(torch.bfloat16).view(-1, 64))
    assert buffers.take((1 << 20) - 8).data_ptr() == place
    assert buffers.take(1 << 20).data_ptr() not in (place, second.data_ptr())


def test_a_large_buffer_is_not_for_what_is_small() -> None:
    buffers = ReadBuffers()
    large = buffers.take(1 << 20)
    buffers.give_back(large)
    assert buffers.take(100).data_ptr() != large.data_ptr()


def test_other_memory_is_left_alone() -> None:
    buffers = ReadBuffers()
    other = torch.empty(1 << 20, dtype=torch.uint8)
    buffers.give_back(other)
    buffers.give_back(None)
    assert buffers.take(1 << 20).data_ptr() != other.data_ptr()


def test_what_is_kept_is_bounded() -> None:
    buffers = ReadBuffers()
    large = [buffers.take(MAX_KEPT_BYTES // 2) for _ in range(3)]
    places = [one.data_ptr() for one in large]
    for one in large:
        buffers.give_back(one)
    again = {buffers.take(MAX_KEPT_BYTES // 2).data_ptr() for _ in range(2)}
    assert again == set(places[:2])
    assert not buffers._free


@pytest.mark.parametrize(
    ("architecture", "options", "is_in_place"),
    [
        ("LlamaForCausalLM", {}, True),
        ("LlamaForCausalLM", {"dtype": "bfloat16"}, False),  # stored as float32
        ("LlamaForCausalLM", {"world_size": 2}, False),
        ("GPT2LMHeadModel", {}, False),  # stored the other way round
    ],
)
def test_what_is_held_as_it_is_stored_is_read_to_where_it_stays(
    architecture: str, options: dict[str, Any], is_in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = ReadBuffers.take

    def noted(self: ReadBuffers, num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        return take(self, num_bytes)

    monkeypatch.setattr(ReadBuffers, "take", noted)
    make_checkpoint(architecture, tmp_path)
    Driver(tmp_path, **options)
    assert (not taken) is is_in_place
