"""What an operator's call is taken for: numbers of the query, defaults, and where weights may come from."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request

from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_frontend.http.operators import sleep_mode
from pagoda_frontend.http.operators.sleep_mode import SleepMode, allowed_weights


class Control:
    """Notes calls; sleeps from the first one on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_asleep = False

    async def sleep(self, **given: Any) -> None:
        self.calls.append(("sleep", given))
        self.is_asleep = True

    async def wake_up(self, **given: Any) -> None:
        self.calls.append(("wake_up", given))
        self.is_asleep = False

    async def is_sleeping(self) -> bool:
        return self.is_asleep


class Engine:
    """Hears of a change after `num_looks` looks."""

    def __init__(self, num_looks: int = 0) -> None:
        self.control = Control()
        self.num_looks = num_looks

    @property
    def is_sleeping(self) -> bool:
        self.num_looks -= 1
        return self.control.is_asleep if self.num_looks < 0 else not self.control.is_asleep


def request_of(query: str) -> Request:
    return Request({"type": "http", "method": "POST", "path": "/sleep", "headers": [], "query_string": query.encode()})


def mode_of(engine: Engine) -> SleepMode:
    return SleepMode(serving=cast("Any", SimpleNamespace()), engine=cast("Any", engine))


@pytest.mark.parametrize(
    ("query", "given"),
    [
        ("", {"level": 1, "mode": "keep", "group": None}),
        ("level=2", {"level": 2, "mode": "keep", "group": None}),
        ("level=0", {"level": 0, "mode": "keep", "group": None}),
        ("mode=abort&group=0", {"level": 1, "mode": "abort", "group": 0}),
        ("level=999999999&group=007", {"level": 999_999_999, "mode": "keep", "group": 7}),
    ],
)
async def test_what_a_query_leaves_out_has_its_default(query: str, given: dict[str, Any]) -> None:
    engine = Engine()
    answer = await mode_of(engine).sleep(request_of(query))
    assert (answer.status_code, bytes(answer.body)) == (200, b"")
    assert engine.control.calls == [("sleep", given)]


@pytest.mark.parametrize(
    ("query", "given"),
    [
        ("", {"tags": [], "group": None}),
        ("tags=weights", {"tags": ["weights"], "group": None}),
        ("tags=kv_cache&group=3&tags=weights", {"tags": ["kv_cache", "weights"], "group": 3}),
    ],
)
async def test_waking_takes_tags(query: str, given: dict[str, Any]) -> None:
    engine = Engine()
    assert (await mode_of(engine).wake_up(request_of(query))).status_code == 200
    assert engine.control.calls == [("wake_up", given)]


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "1000000000", "+1", " 1"])
async def test_what_is_no_number_is_named(text: str) -> None:
    for name in ("level", "group"):
        engine = Engine()
        with pytest.raises(InvalidRequest) as caught:
            await mode_of(engine).sleep(request_of(f"{name}={text.replace('+', '%2B')}"))
        assert (caught.value.field, caught.value.message) == (name, f"{name} is {text!r}, must be a number")
        assert not engine.control.calls


@pytest.mark.parametrize(("num_late", "num_looks"), [(0, 1), (3, 4), (1000, 200)])
async def test_an_answer_waits_for_this_frontend_s_own_view_but_not_for_ever(
    num_late: int, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, waits = Engine(num_late), []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(sleep_mode, "asyncio", SimpleNamespace(sleep=sleep))
    await mode_of(engine).sleep(request_of(""))
    assert num_late - engine.num_looks == num_looks
    assert sum(waits) == pytest.approx(0.01 * min(num_late, 200))


ALLOWED = ("/models", "org/name", "relative")


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        ("/models", "/models"),
        ("/models/a", "/models/a"),
        ("/models//a/./b/", "/models/a/b"),
        ("/models/../models/a", "/models/a"),
        ("org/name", "org/name"),
        ("relative", "relative"),
        ("/models/../etc", None),
        ("/modelsa", None),
        ("/", None),
        ("org/name/more", None),
        ("relative/more", None),
        ("models/a", None),
        ("", None),
    ],
)
def test_where_weights_may_come_from(model: str, taken: str | None) -> None:
    assert allowed_weights(model, allowed=("*",)) == model
    if taken is not None:
        assert allowed_weights(model, allowed=ALLOWED) == taken
        return
    for field, bound in (("model", "the served model, one"), ("lora_path", "one")):
        with pytest.raises(PagodaError) as caught:
            allowed_weights(model, allowed=ALLOWED, field=field)
        error = caught.value
        assert error.message == f"{field} is {model!r}, must be {bound} of --allowed-weights, or below one of them"
        assert (error.field, error.code) == (field, Code.PERMISSION_DENIED)


def test_a_long_name_is_cut_in_the_message() -> None:
    with pytest.raises(PagodaError, match="^model is '" + "x" * 200 + "', must be"):
        allowed_weights("x" * 300, allowed=())
