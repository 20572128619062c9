"""What ends a completion and what of it is shown: stop strings across tokens and characters, tokens, min_tokens."""

from typing import Any

import pytest

from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import Running

COMPLETIONS = "/v1/completions"
TEXT = "Once a café 🙂🙃 served 日本語 menus, naïvely. The end of it."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def told(frontend: Running, **body: Any) -> tuple[str, str, Any]:
    """Text, finish_reason and stop_reason, which are the same as a stream."""
    [choice] = (await frontend.complete(max_tokens=400, **body))["choices"]
    events = await frontend.events(COMPLETIONS, prompt=[5, 6, 7], max_tokens=400, **body)
    parts = [event["choices"][0] for event in events[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert "\N{REPLACEMENT CHARACTER}" not in choice["text"]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("stop", ["🙃", "é 🙂", "本", "語 menus", "ïve", ".", "t.", "Once", "end of it."])
async def test_a_stop_string_is_found_wherever_tokens_and_characters_end(
    frontend: Running, tokenizer: Tokenizer, stop: str, tokens_per_step: int
) -> None:
    frontend.fake.script, frontend.fake.tokens_per_step = tokenizer.encode(TEXT), tokens_per_step
    before = TEXT.partition(stop)[0]
    assert await told(frontend, stop=stop) == (before, "stop", stop)
    assert await told(frontend, stop=[stop], include_stop_str_in_output=True) == (before + stop, "stop", stop)
    assert await told(frontend, stop=["never", "🙂🙂", stop, "nowhere"]) == (before, "stop", stop)


async def test_what_only_begins_like_a_stop_string_is_shown(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    assert await told(frontend, stop=["it.!", "🙂🙂", "日本人", "of itself"]) == (TEXT, "stop", None)


async def test_nothing_ends_a_sequence_before_min_tokens(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    count = len(tokenizer.encode("Once a café 🙂🙃 served"))
    text, _, reason = await told(frontend, stop="a", min_tokens=count)
    assert reason == "a"
    assert text == "Once a café 🙂🙃 served 日本語 menus, naïvely. The end of it."[: len(text)]
    assert len(tokenizer.encode(text)) >= count - 1
    await frontend.complete(min_tokens=3, stop_token_ids=[9], ignore_eos=True, max_tokens=5)
    params = frontend.fake.submits[-1].sampling_params
    assert (params.min_tokens, list(params.stop_token_ids), params.ignore_eos) == (3, [9], True)


async def test_special_tokens_are_shown_when_asked_for(frontend: Running, tokenizer: Tokenizer) -> None:
    special = tokenizer.eos_token_id
    assert special is not None
    name = tokenizer.token_text(special)
    words = tokenizer.encode("one two", add_special_tokens=False)
    frontend.fake.script = [*words, special, special, *words]
    hidden = await told(frontend, ignore_eos=True, stop=["never"])
    assert hidden[0].startswith("one two")
    assert name not in hidden[0]
    for spaces in (True, False):  # without effect, as with transformers' fast tokenizers
        shown = await told(
            frontend, ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=spaces, stop=name + "x"
        )
        assert f"one two{name}{name}one two" in shown[0]
    stopped = await told(frontend, ignore_eos=True, skip_special_tokens=False, stop=name)
    assert stopped == ("one two", "stop", name)


async def test_a_stop_token_is_shown_only_with_the_stop_strings(frontend: Running, tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("one two three", add_special_tokens=False)
    frontend.fake.script = words
    without = await told(frontend, stop_token_ids=[words[-1]])
    assert without == (tokenizer.decode(words[:-1]), "stop", words[-1])
    kept = await told(frontend, stop_token_ids=[words[-1]], include_stop_str_in_output=True)
    assert kept == (tokenizer.decode(words), "stop", words[-1])
