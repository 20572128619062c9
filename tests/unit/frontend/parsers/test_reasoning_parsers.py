"""Reasoning parsers: what they find, and that it does not depend on how the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.registry import find_reasoning_parser, reasoning_parser_names


def parse(name: str, *texts: str, prompt: str = "") -> tuple[str, str]:
    parser = find_reasoning_parser(name)(prompt=prompt)
    pieces = [*map(parser.append, texts), parser.finish()]
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


CASES = [
    ("deepseek_r1", "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
    ("deepseek_r1", "", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("deepseek_r1", "<think>\n", "One\n\ntwo</think> </think>", ("One\n\ntwo", "</think>")),
    ("deepseek_r1", "", "cut off </thi", ("cut off </thi", "")),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes. <think>no</think>", ("", "Yes. <think>no</think>")),
    ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
    ("qwen3", "", " Yes, </think> is a tag.", ("", " Yes, </think> is a tag.")),
    ("qwen3", "<think>", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("qwen3", "", "<thi", ("", "<thi")),
    ("qwen3", "", "<think>\n\n</think>\n\n", ("", "")),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.")),
    ("granite", "", "Here is my thought process: Hm. Here is my response: Yes.", ("Hm.", "Yes.")),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     ("Hm.", "Yes.")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_reasoning_and_answer_are_told_apart_wherever_the_text_is_cut(
    name: str, prompt: str, text: str, expected: tuple[str, str]
) -> None:
    assert parse(name, text, prompt=prompt) == parse(name, *text, prompt=prompt) == expected
    for place in range(1, len(text)):
        assert parse(name, text[:place], text[place:], prompt=prompt) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "<", "a", "</", "think>"])),
    st.sampled_from(["", "<think>\n", "<think></think>"]),
)
def test_no_text_is_parsed_differently_in_pieces(pieces: list[str], prompt: str) -> None:
    text = "".join(pieces)
    for name in reasoning_parser_names():
        whole = parse(name, text, prompt=prompt)
        assert parse(name, *text, prompt=prompt) == parse(name, *pieces, prompt=prompt) == whole, name


def test_the_answer_streams_as_it_comes() -> None:
    parser = find_reasoning_parser("qwen3")(prompt="")
    assert parser.append("<think>Let") == ("Let", "")
    assert parser.append(" me see") == (" me see", "")
    assert parser.append("</think>\n\n") == ("", "")
    assert parser.append("Yes") == ("", "Yes")


def test_an_unknown_parser_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1"):
        find_reasoning_parser("nonsense")
