"""Mixtral: with a sliding window and without, and what each option does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.registry import FAMILIES, Family
from pagoda_worker.models.spec import DecoderSpec
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, Reference, make_prompts, open_reference
from tests.unit.worker.models.test_exactness import CLOSE

MIXTRAL = "MixtralForCausalLM"
WINDOW = 24


@pytest.fixture(scope="module", params=[None, WINDOW])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("checkpoint")
    return open_reference(directory, MIXTRAL, sliding_window=request.param)


def _outputs(driver: Driver, **options: Any) -> list[list[int]]:
    return [one.output for one in driver.generate(make_prompts(), max_tokens=NUM_TOKENS, **options)]


@pytest.mark.parametrize("chunk", [16, 100])
def test_greedy_tokens_equal_transformers(chunk: int, reference: Reference) -> None:
    assert _outputs(reference.driver, chunk=chunk) == reference.outputs


def test_logprobs_equal_transformers(reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    for sequence in reference.driver.generate(make_prompts(), params, max_tokens=8):
        expected = reference.logprobs(sequence.prompt + sequence.output)
        for index, entries in enumerate(sequence.logprobs):
            row = expected[len(sequence.prompt) + index - 1]
            assert list(entries.values()) == pytest.approx([float(row[token]) for token in entries], **CLOSE)


def test_only_blocks_in_a_window_are_kept(reference: Reference) -> None:
    window = FAMILIES[MIXTRAL].spec(reference.model.config.to_dict()).window(0)
    driver = Driver(reference.directory)
    assert [group.window for group in driver.groups] == [window]
    _outputs(driver)
    assert (driver.num_reused > 0) == (window is not None)


def _moe(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **options))  # type: ignore[type-var]  # it is there


def _rope(**options: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, rope=replace(spec.rope, **options))  # type: ignore[type-var]  # it is there


SPOILT: dict[str, Callable[[DecoderSpec], DecoderSpec]] = {
    "window": lambda spec: replace(spec, windows=() if spec.windows else (WINDOW,) * spec.num_layers),
    "size of the window": lambda spec: replace(spec, windows=(WINDOW + 1,) * spec.num_layers),
    "base of rotations": _rope(theta=10000.0),
    "pairs of rotations": _rope(is_interleaved=True),
    "normalised weights": _moe(is_normalized=False),
    "experts of a token": _moe(num_experts_per_token=1),
    "scores": _moe(scoring="sigmoid"),
}
"""An option as it should not be."""


@pytest.mark.parametrize("name", SPOILT)
def test_every_option_changes_tokens(name: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    family, spoil = FAMILIES[MIXTRAL], SPOILT[name]
    monkeypatch.setitem(FAMILIES, MIXTRAL, Family(lambda config: spoil(family.read(config)), family.names))
    assert _outputs(Driver(reference.directory)) != reference.outputs
