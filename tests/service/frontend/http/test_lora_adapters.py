"""Adapters that operators add and take away: what the engine is asked, and the whole answers."""

from typing import Any

import pytest

from pagoda_common.errors import NotFound
from pagoda_common.params.lora_adapter import LoraAdapter
from tests.service.frontend.harness import Running, running_frontend

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Noted:
    """What the engine is asked."""

    def __init__(self) -> None:
        self.added: list[tuple[LoraAdapter, bool]] = []
        self.removed: list[str] = []

    async def add(self, adapter: LoraAdapter, *, load_inplace: bool) -> None:
        self.added.append((adapter, load_inplace))

    async def remove(self, name: str) -> None:
        if name == "unknown":
            raise NotFound("there is no adapter 'unknown'", field="lora_name")
        self.removed.append(name)


def note(running: Running, monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()
    monkeypatch.setattr(running.server.engine, "add_lora", noted.add)
    monkeypatch.setattr(running.server.engine, "remove_lora", noted.remove)
    return noted


SETTINGS: dict[str, Any] = {"enable_runtime_lora_updating": True, "allowed_weights": ("/adapters", "org/adapter")}


async def test_what_is_loaded_and_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_frontend(**SETTINGS) as running:
        noted = note(running, monkeypatch)
        for fields, adapter, in_place in (
            ({"lora_path": "/adapters/a/../b"}, LoraAdapter(name="mine", path="/adapters/b"), False),
            (
                {"lora_path": "org/adapter", "load_inplace": True, "base_model_name": "base"},
                LoraAdapter(name="mine", path="org/adapter", base_model_name="base"),
                True,
            ),
        ):
            answer = await running.post(LOAD, {"lora_name": "mine", **fields})
            assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert noted.added.pop() == (adapter, in_place)
        answer = await running.post(UNLOAD, {"lora_name": "mine"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert noted.removed == ["mine"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "message"),
    [
        (
            LOAD,
            {"lora_name": "alias", "lora_path": "/adapters/a"},
            400,
            "lora_name",
            "lora_name is 'alias', which is the model's own name",
        ),
        (
            LOAD,
            {"lora_name": "mine", "lora_path": "/etc"},
            403,
            "lora_path",
            "lora_path is '/etc', must be one of --allowed-weights, or below one of them",
        ),
        (
            LOAD,
            {"lora_name": "m" * 513, "lora_path": "/adapters/a"},
            400,
            "lora_name",
            "lora name has 513 characters, must have at most 512",
        ),
        (
            LOAD,
            {"lora_name": "mine", "lora_path": "/adapters/" + "a" * 4096},
            400,
            "lora_path",
            "lora path has 4106 characters, must have at most 4096",
        ),
        (
            LOAD,
            {"lora_name": "mine", "lora_path": "/adapters/a", "base_model_name": "b" * 513},
            400,
            "base_model_name",
            "lora base_model_name has 513 characters, must have at most 512",
        ),
        (LOAD, {"lora_name": "", "lora_path": "/adapters/a"}, 400, None, None),
        (LOAD, {"lora_name": "mine"}, 400, "lora_path", None),
        (LOAD, {"lora_path": "/adapters/a"}, 400, "lora_name", None),
        (UNLOAD, {}, 400, "lora_name", None),
        (UNLOAD, {"lora_name": "unknown"}, 404, "lora_name", "there is no adapter 'unknown'"),
    ],
)
async def test_what_is_refused(
    path: str,
    body: dict[str, Any],
    status: int,
    field: str | None,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_frontend(**SETTINGS) as running:
        noted = note(running, monkeypatch)
        answer = await running.post(path, body)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert field in (None, error["param"])
        assert message in (None, error["message"])
        assert (noted.added, noted.removed) == ([], [])


async def test_they_are_not_there_unless_asked_for() -> None:
    async with running_frontend() as running:
        for path in (LOAD, UNLOAD):
            assert (await running.post(path, {"lora_name": "mine"})).status_code == 404
