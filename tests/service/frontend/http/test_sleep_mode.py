"""/sleep, /wake_up, /is_sleeping and /reload_weights: only where they are switched on, and only with a key."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.v1 import scheduler_pb2
from tests.service.frontend.harness import MODEL, Running, running_frontend, until

PATHS = (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/reload_weights"))


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_frontend(enable_sleep_mode=True, allowed_weights=("/models", "missing")) as running:
        yield running


async def is_sleeping(running: Running) -> Any:
    return (await running.http.get("/is_sleeping")).json()


async def test_a_sleeping_model_is_not_ready_and_requests_wait_for_it(running: Running) -> None:
    assert await is_sleeping(running) == {"is_sleeping": False}
    answer = await running.post("/sleep")
    assert (answer.status_code, answer.content) == (200, b"")
    assert await is_sleeping(running) == {"is_sleeping": True}
    await until(lambda: not running.server.serving.is_ready)
    ready = await running.http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "the model sleeps (level 1)")
    metrics = (await running.http.get("/metrics")).text
    assert 'sleep_state="weights_offloaded"} 1.0' in metrics
    assert 'sleep_state="awake"} 0.0' in metrics
    waiting = asyncio.create_task(running.complete(max_tokens=3))
    await until(lambda: running.fake.submits)
    assert not waiting.done()
    assert (await running.post("/wake_up")).status_code == 200
    assert (await waiting)["usage"]["completion_tokens"] == 3
    await until(lambda: running.server.serving.is_ready)


async def test_an_answer_comes_after_the_state_is_told_everywhere(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce = running.fake.set_ready

    def announce_late(is_ready: bool, reason: str = "") -> None:
        asyncio.get_running_loop().call_later(0.1, announce, is_ready, reason)

    monkeypatch.setattr(running.fake, "set_ready", announce_late)
    for _ in range(3):
        assert (await running.post("/sleep")).status_code == 200
        assert 'sleep_state="weights_offloaded"} 1.0' in (await running.http.get("/metrics")).text
        assert (await running.http.get("/ready")).status_code == 503
        assert (await running.post("/wake_up")).status_code == 200
        assert 'sleep_state="awake"} 1.0' in (await running.http.get("/metrics")).text
        assert (await running.http.get("/ready")).status_code == 200


async def test_levels_modes_groups_and_tags_are_passed_on(running: Running) -> None:
    await running.post("/sleep?level=2&mode=abort&group=3")
    assert running.fake.sleeps == [
        scheduler_pb2.SleepRequest(level=2, mode=scheduler_pb2.SLEEP_MODE_ABORT, group=3),
    ]
    await running.post("/wake_up?tags=weights&tags=kv_cache&group=0")
    assert running.fake.wakes == [scheduler_pb2.WakeUpRequest(tags=["weights", "kv_cache"], group=0)]


@pytest.mark.parametrize(
    ("query", "field"), [("level=0", "level"), ("level=deep", "level"), ("mode=wait", "mode"), ("group=-1", "group")]
)
async def test_a_wrong_query_is_a_400(running: Running, query: str, field: str) -> None:
    answer = await running.post(f"/sleep?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not running.fake.sleeps


async def test_other_weights(running: Running) -> None:
    answer = await running.post("/reload_weights", {"model": "/models/new", "revision": "r1"})
    assert (answer.status_code, answer.json()) == (200, {"num_groups": 1, "seconds": 0.5, "pause_s": 0.25})
    assert running.fake.reloads == [scheduler_pb2.ReloadWeightsRequest(model="/models/new", revision="r1")]
    answer = await running.post("/reload_weights", {"model": "missing"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "model 'missing' is not a directory")
    assert (await running.post("/reload_weights", {})).json()["error"]["param"] == "model"


async def test_they_are_not_there_unless_asked_for() -> None:
    async with running_frontend() as running:
        for method, path in PATHS:
            assert (await running.http.request(method, path)).status_code == 404


@pytest.mark.parametrize(
    "model",
    [
        "/etc",
        "/models/../etc",
        "/modelsandmore",
        "models/new",
        "org/model",
        "/",
        "//models/../etc",
        "\x00",
        "../models",
    ],
)
async def test_weights_come_from_where_the_operator_says_alone(running: Running, model: str) -> None:
    answer = await running.post("/reload_weights", {"model": model})
    assert answer.status_code == 403
    assert answer.json()["error"]["message"].endswith(
        "must be the served model, one of --allowed-weights, or below one of them"
    )
    assert not running.fake.reloads


async def test_a_way_with_dots_is_passed_on_without(running: Running) -> None:
    assert (await running.post("/reload_weights", {"model": "/models/a/../b/"})).status_code == 200
    assert running.fake.reloads[-1].model == "/models/b"
    assert (await running.post("/reload_weights", {"model": "pagoda-tiny"})).status_code == 200
    async with running_frontend(enable_sleep_mode=True, allowed_weights=("*",)) as other:
        assert (await other.post("/reload_weights", {"model": "org/model"})).status_code == 200


async def test_an_api_key_may_not_do_what_concerns_all() -> None:
    for operator in ((), ("the-operator's",)):
        async with running_frontend(enable_sleep_mode=True, api_key=("secret",), operator_key=operator) as running:
            for method, path in PATHS:
                answer = await running.http.request(method, path, headers={"Authorization": "Bearer secret"})
                assert answer.status_code == (200 if path == "/is_sleeping" else 403), path
                if path != "/is_sleeping":
                    assert "--operator-key" in answer.json()["error"]["message"]
            assert not running.fake.sleeps
            assert not running.fake.reloads


async def test_an_operators_key_does_it_and_opens_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-a-file\n")
    for api_key in ((), ("secret",)):
        keys: dict[str, Any] = {"api_key": api_key, "operator_key": ("given",), "operator_key_file": str(file)}
        async with running_frontend(enable_sleep_mode=True, **keys) as running:
            for method, path in PATHS[:2]:
                assert (await running.http.request(method, path)).status_code == 401
            for key in ("given", "from-a-file"):
                headers = {"Authorization": f"Bearer {key}"}
                for method, path in PATHS[:3]:
                    assert (await running.http.request(method, path, headers=headers)).status_code == 200
                body = {"model": MODEL, "prompt": [5], "max_tokens": 1}
                answer = await running.post("/v1/completions", body, headers=headers)
                assert answer.status_code == (401 if api_key else 200)


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "Text/Plain"]
)
async def test_a_form_does_nothing(running: Running, content_type: str) -> None:
    for path in ("/sleep", "/wake_up", "/reload_weights"):
        headers = {"Content-Type": content_type}
        answer = await running.http.post(path, content=b'{"model": "/models/a"}', headers=headers)
        assert answer.status_code == 400, path
        assert "Content-Type" in answer.json()["error"]["message"]
    assert (running.fake.sleeps, running.fake.wakes, running.fake.reloads) == ([], [], [])


async def test_they_need_a_key() -> None:
    async with running_frontend(enable_sleep_mode=True, api_key=("secret",)) as running:
        for method, path in PATHS:
            assert (await running.http.request(method, path)).status_code == 401
        assert not running.fake.sleeps
        headers = {"Authorization": "Bearer secret"}
        assert (await running.http.get("/is_sleeping", headers=headers)).status_code == 200
        document = (await running.http.get("/openapi.json")).json()
        assert all("security" in document["paths"][path][method.lower()] for method, path in PATHS)
        assert (await running.post("/v1/completions", {"model": MODEL, "prompt": [5]}, headers=headers)).is_success
