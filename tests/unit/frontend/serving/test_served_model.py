"""What is known of a model once the engine has it: every field, and where tokenizer and names come from."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.engine.interface import Engine, ModelSummary
from pagoda_common.text.prompt_files import PromptFiles
from pagoda_common.version import VERSION
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.serving import served_model
from pagoda_frontend.serving.served_model import ServedModel, load_served_model

SUMMARY = ModelSummary(
    model="/models/loaded",
    vocab_size=3000,
    max_model_len=77,
    embedding_size=64,
    eos_token_ids=(5, 6),
    generation_config_json='{"temperature": 0.25, "max_new_tokens": 9}',
    pooling_tasks=("classify", "embed"),
    only_pools=True,
    labels=("good", "bad"),
    has_matryoshka=True,
    matryoshka_dimensions=(8, 16),
    digest="0123456789abcdef",
)


class Loads:
    """Tokenizers that are asked for."""

    def __init__(self, order: list[str]) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self._order = order

    def load(self, source: str, *, revision: str | None) -> Any:
        self.asked.append((source, revision))
        self._order.append("tokenizer")
        return SimpleNamespace(
            name=source,
            longest_token_bytes=12,
            prompt_files=PromptFiles({"a": "A"}),
            choose_template=lambda template, *, has_tools: (template, has_tools),
        )


async def loaded(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[ServedModel, Loads, list[str]]:
    order: list[str] = []
    loads = Loads(order)

    async def wait_until_ready() -> None:
        order.append("ready")

    engine = SimpleNamespace(wait_until_ready=wait_until_ready, model_summary=SUMMARY)
    monkeypatch.setattr(served_model, "Tokenizer", loads)
    monkeypatch.setattr(served_model, "time", SimpleNamespace(time=lambda: 1234.9))
    work = WorkPool()
    model = await load_served_model(
        FrontendConfig(scheduler="127.0.0.1:1", **config),
        engine=cast("Engine", engine),
        work=work,
        chat_template="the template",
    )
    work.close()
    return model, loads, order


async def test_every_field_is_the_engine_s_or_the_config_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loads, order = await loaded(
        monkeypatch,
        model="org/name",
        revision="r1",
        override_generation_config='{"top_k": 7}',
        structured_outputs_config='{"disable_any_whitespace": true}',
    )
    assert (loads.asked, order) == ([("org/name", "r1")], ["tokenizer", "ready"])
    assert model.names == ("org/name",)
    assert (model.max_model_len, model.vocab_size, model.embedding_size) == (77, 3000, 64)
    assert (model.pooling_tasks, model.only_pools, model.labels) == (("classify", "embed"), True, ("good", "bad"))
    assert (model.has_matryoshka, model.matryoshka_dimensions) == (True, (8, 16))
    assert model.prompt_files == PromptFiles({"a": "A"})
    assert (model.defaults.max_new_tokens, model.defaults.values) == (9, {"temperature": 0.25, "top_k": 7})
    assert model.structured_outputs.disable_any_whitespace
    assert model.fingerprint == f"pagoda-{VERSION}-01234567"
    assert (model.created, model.lora) == (1234, None)
    command = model.grammars.helpers.command
    assert command[-4:] == ["org/name", "r1", "3000", "5,6"]
    assert model.prompts.template(None, tools=None) == ("the template", False)


async def test_a_model_of_the_engine_s_own_is_known_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loads, order = await loaded(monkeypatch)
    assert (loads.asked, order) == ([("/models/loaded", None)], ["ready", "tokenizer"])
    assert model.names == ("/models/loaded",)
    assert model.grammars.helpers.command[-4:] == ["/models/loaded", "", "3000", "5,6"]


async def test_names_and_tokenizer_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loads, _ = await loaded(
        monkeypatch, model="org/name", tokenizer="org/other", served_model_name=("one", "two")
    )
    assert (model.names, loads.asked) == (("one", "two"), [("org/other", None)])


async def test_a_generation_config_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = await loaded(monkeypatch, generation_config="vllm")
    assert (model.defaults.max_new_tokens, model.defaults.values) == (None, {})


async def test_a_label_without_a_name_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = await loaded(monkeypatch)
    assert [model.label(place) for place in range(4)] == ["good", "bad", "LABEL_2", "LABEL_3"]
