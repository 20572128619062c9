"""Models of installed packages: found by the architecture, before our own families, and never for transformers."""

from pathlib import Path

import pytest

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.model import BuildConfig
from pagoda_worker.models.registry import FAMILIES, factory_of


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modelled.py").write_text("def build(**options):\n    return 'built'\nnothing = 3\n")
    info = tmp_path / "modelled-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: modelled\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pagoda.models]\nModelledLM = modelled:build\nNothingLM = modelled:nothing\nLostLM = modelled:lost\n"
        "LlamaForCausalLM = modelled:build\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def config(architecture: str, model_impl: str = "auto") -> BuildConfig:
    return BuildConfig(
        checkpoint={"architectures": [architecture]},
        engine=ModelConfig(model_impl=model_impl),  # type: ignore[arg-type]
    )


def test_an_architecture_is_built_by_what_is_installed_for_it() -> None:
    assert factory_of(config("ModelledLM"))(config=config("ModelledLM")) == "built"  # type: ignore[comparison-overlap]


def test_an_installed_model_goes_before_our_own() -> None:
    assert factory_of(config("LlamaForCausalLM")) is not FAMILIES["LlamaForCausalLM"]
    assert factory_of(config("MistralForCausalLM")) is FAMILIES["MistralForCausalLM"]


def test_transformers_is_taken_when_it_is_asked_for() -> None:
    assert factory_of(config("ModelledLM", "transformers")).__name__ == "TransformersModel"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("LostLM", "the model of LostLM (modelled:lost) cannot be imported: AttributeError"),
        ("NothingLM", "the model of NothingLM (modelled:nothing) must be a class or a function"),
    ],
)
def test_what_cannot_be_loaded_is_named(architecture: str, reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        factory_of(config(architecture))
    assert reason in raised.value.message
