"""Stop strings: found wherever they begin in a token, never shown in part, streamed or not."""

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, MODEL, PROMPT, Api, Json, chat_body

LENGTH = 40
SPANS = [(0, 1), (0, 6), (1, 2), (3, 9), (5, 6), (7, 20), (10, 11), (12, 30), (25, 28), (30, 60)]
"""Where in the greedy text the stop string stands: any characters, without regard to tokens or words."""


def body(**fields: object) -> Json:
    return {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, **fields}


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("is_kept", [False, True], ids=["cut", "kept"])
def test_text_ends_at_the_first_place_of_the_stop_string(api: Api, span: tuple[int, int], is_kept: bool) -> None:
    text = api.text(max_tokens=LENGTH)
    stop = text[slice(*span)]
    expected = text[: text.index(stop) + (len(stop) if is_kept else 0)]
    fields = {"stop": stop, "include_stop_str_in_output": is_kept}
    [choice] = api.complete(max_tokens=LENGTH, **fields)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    stream = api.stream(COMPLETIONS, body(**fields))
    assert (stream.text(), stream.finish_reason()) == (expected, "stop")
    assert stream.choices()[-1]["stop_reason"] == stop


def test_the_earliest_of_several_stops_wins(api: Api) -> None:
    text = api.text(max_tokens=LENGTH)
    stops = [text[20:24], text[8:11], text[30:32], "\u2603"]
    [choice] = api.complete(max_tokens=LENGTH, stop=stops)["choices"]
    first = min((stop for stop in stops if stop in text), key=text.index)
    assert choice["text"] == text[: text.index(first)]
    assert choice["stop_reason"] == first


def test_a_stop_string_in_the_prompt_does_not_count(api: Api) -> None:
    text = api.text(max_tokens=LENGTH, stop=["Once upon"], echo=True)
    assert text == PROMPT + api.text(max_tokens=LENGTH)


def test_the_end_of_prompt_and_beginning_of_text_do_not_make_a_stop_string(api: Api) -> None:
    text = api.text(max_tokens=LENGTH)
    stop = PROMPT[-3:] + text[:3]
    assert stop not in text
    assert api.text(max_tokens=LENGTH, stop=[stop]) == text


def test_a_part_of_a_stop_string_at_the_end_of_the_text_is_shown(api: Api) -> None:
    """What might have become a stop string is held back while tokens come, and given when none come any more."""
    text = api.text(max_tokens=LENGTH)
    stop = text[-3:] + "\u2603"
    assert api.text(max_tokens=LENGTH, stop=[stop]) == text
    stream = api.stream(COMPLETIONS, body(stop=[stop]))
    assert (stream.text(), stream.finish_reason()) == (text, "length")


def test_usage_counts_the_tokens_of_the_stop_string(api: Api) -> None:
    text = api.text(max_tokens=LENGTH)
    answer = api.complete(max_tokens=LENGTH, stop=text[10:14], return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"])


def test_a_stop_string_of_a_chat(api: Api) -> None:
    text = api.says(max_tokens=LENGTH)
    stop = text[8:15]
    [choice] = api.chat(max_tokens=LENGTH, stop=[stop])["choices"]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert api.stream(CHAT, chat_body(max_tokens=LENGTH, stop=[stop])).text() == text[: text.index(stop)]


def test_each_choice_stops_for_itself(api: Api) -> None:
    fields: Json = {"temperature": 1.0, "seed": 4, "n": 4, "max_tokens": LENGTH}
    plain = [choice["text"] for choice in api.complete(**fields)["choices"]]
    for choice, text in zip(api.complete(**fields, stop=["a", "."])["choices"], plain, strict=True):
        ends = [text.index(stop) for stop in ("a", ".") if stop in text]
        assert choice["text"] == (text[: min(ends)] if ends else text)
