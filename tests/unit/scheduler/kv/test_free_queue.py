"""FreeQueue against an OrderedDict, by random operations."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from pagoda_scheduler.kv.free_queue import FreeQueue

SIZE = 6


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "front"]), st.integers(0, SIZE - 1))))
def test_like_an_ordered_dict(operations: list[tuple[str, int]]) -> None:
    queue, model = FreeQueue(size=SIZE), OrderedDict.fromkeys(range(SIZE))
    for name, number in operations:
        if name == "pop" and model:
            assert queue.pop_front() == model.popitem(last=False)[0]
        elif name == "remove" and number in model:
            queue.remove(number)
            del model[number]
        elif name in ("append", "front") and number not in model:
            model[number] = None
            if name == "append":
                queue.append(number)
            else:
                queue.append_front(number)
                model.move_to_end(number, last=False)
        assert len(queue) == len(model)
        assert [number for number in range(SIZE) if number in queue] == sorted(model)
    assert [queue.pop_front() for _ in range(len(queue))] == list(model)
