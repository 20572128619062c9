"""Reasoning parsers: what they find, and that it does not depend on how the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_common.errors import ConfigError
from pagoda_frontend.reasoning_parsers.registry import find_reasoning_parser, reasoning_parser_names


def parse(name: str, *texts: str, prompt: str = "", openers: tuple[str, ...] = ()) -> tuple[str, str]:
    parser = find_reasoning_parser(name)(prompt=prompt)
    parser.call_openers = openers
    pieces = [*map(parser.append, texts), parser.finish()]
    return "".join(piece[0] for piece in pieces), "".join(piece[1] for piece in pieces)


CASES = [
    ("deepseek_r1", "", "<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "\n\nYes.")),
    ("deepseek_r1", "", "\n <think>Hm.</think>\nYes.", ("Hm.", "\nYes.")),
    ("deepseek_r1", "", "\n Hm.</think>\nYes.", ("\n Hm.", "\nYes.")),
    ("deepseek_r1", "", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("deepseek_r1", "<think>\n", "One\n\ntwo</think> </think>", ("One\n\ntwo", " </think>")),
    ("deepseek_r1", "", "cut off </thi", ("cut off </thi", "")),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes. <think>no</think>", ("", "Yes. <think>no</think>")),
    ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", ("\nHm.\n", "\n\nYes.")),
    ("qwen3", "", " Yes, </think> is a tag.", ("", " Yes, </think> is a tag.")),
    ("qwen3", "<think>", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("qwen3", "", "<thi", ("", "<thi")),
    ("qwen3", "", "<think>\n\n</think>\n\n", ("\n\n", "\n\n")),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.")),
    ("granite", "", "Here is my thought process: Hm. Here is my response: Yes.", ("Hm.", "Yes.")),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     ("Hm.", "Yes.")),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>\nYes.", ("Hm.", "\nYes.")),
    ("gemma4", "", "<|channel>thought\nHm.\n<channel|>Yes.", ("Hm.\n", "Yes.")),
    ("gemma4", "", "<|channel>thousands<channel|>Yes.", ("thousands", "Yes.")),
    ("gemma4", "<|channel>thought\n<channel|>", "thought\nYes.", ("", "thought\nYes.")),
    ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nYes. \n</answer>\n<c>", ("Hm.", "Yes.\n<c>")),
    ("hunyuan_a13b", "<think>\n\n</think>\n", "<answer>\nYes.\n</answer>", ("", "Yes.")),
    ("hunyuan_a13b", "", "Yes </answer>.", ("", "Yes </answer>.")),
    ("hunyuan_a13b", "", "<think>Hm.</think><answer>Yes. \n", ("Hm.", "Yes. \n")),
    ("hunyuan_a13b", "", "<think>Hm.</think><answer> \n A  b \n c \n</answer>", ("Hm.", "A  b \n c")),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n\nNo.\n</response>\n", ("Hm.", "Yes.\n\nNo.\n")),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\nYes <response>.", ("Hm.", "Yes <response>.")),
    ("minimax_m2", "<think>\n", "Hm.\n</think>\n\nYes.", ("Hm.\n", "\n\nYes.")),
    ("minimax_m2_append_think", "", "", ("", "<think>")),
    ("minimax_m2_append_think", "<think>\n", "Hm.</think>\n\nYes.", ("", "<think>Hm.</think>\n\nYes.")),
    ("nemotron_v3", "<think>", "Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("step3", "<think>\n", "Hm.\n</think>Yes.", ("Hm.\n", "Yes.")),
    ("step3p5", "", "\n One \n two\n\n\n</think>\n\nYes.", ("\n One \n two\n\n", "\nYes.")),
    ("step3p5", "", "\n<think>Hm.\n</think>\nYes.", ("Hm.", "Yes.")),
    ("olmo3", "", "<think>\n</think>\n\nYes.", ("\n", "\n\nYes.")),
    ("kimi_k2", "", "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("glm45", "<think></think>", "Yes.", ("", "Yes.")),
    ("olmo3", "<think>", "Hm.</think>Yes.", ("Hm.", "Yes.")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_reasoning_and_answer_are_told_apart_wherever_the_text_is_cut(
    name: str, prompt: str, text: str, expected: tuple[str, str]
) -> None:
    assert parse(name, text, prompt=prompt) == parse(name, *text, prompt=prompt) == expected
    for place in range(1, len(text)):
        assert parse(name, text[:place], text[place:], prompt=prompt) == expected


PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "<", "a", "</", "think>", "<call>", "<ca"),
    *("<answer>", "</answer>", "<response>", "</response>", "<|channel>", "<channel|>", "thought\n", "thou"),
    *("<seed:think>", "</seed:think>"),
]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES)),
    st.sampled_from(["", "<think>\n", "<think></think>", "<seed:think>", "<|channel>"]),
    st.sampled_from([(), ("<call>",)]),
)
def test_no_text_is_parsed_differently_in_pieces(pieces: list[str], prompt: str, openers: tuple[str, ...]) -> None:
    text = "".join(pieces)
    for name in reasoning_parser_names():
        whole = parse(name, text, prompt=prompt, openers=openers)
        assert parse(name, *text, prompt=prompt, openers=openers) == whole, name
        assert parse(name, *pieces, prompt=prompt, openers=openers) == whole, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Hm. <call>now", ("Hm. ", "<call>now")),
        ("<think>I may <call>. No.</think>Yes. <call>now", ("I may <call>. No.", "Yes. <call>now")),
        ("<think>Hm. <cal", ("Hm. <cal", "")),
        ("Yes. <call>now", ("", "Yes. <call>now")),
    ],
)
def test_a_call_ends_reasoning_that_is_never_closed(text: str, expected: tuple[str, str]) -> None:
    assert parse("qwen3", text, openers=("<call>",)) == parse("qwen3", *text, openers=("<call>",)) == expected
    trimmed = (expected[0].rstrip(), expected[1])
    name = "hunyuan_a13b"  # where white space belongs to the tags
    assert parse(name, text, openers=("<call>",)) == parse(name, *text, openers=("<call>",)) == trimmed


def test_the_answer_streams_as_it_comes() -> None:
    parser = find_reasoning_parser("qwen3")(prompt="")
    assert parser.append("<think>Let") == ("Let", "")
    assert parser.append(" me see") == (" me see", "")
    assert parser.append("</think>\n\n") == ("", "\n\n")
    assert parser.append("Yes") == ("", "Yes")


@pytest.mark.parametrize(
    ("name", "text", "is_told"),
    [
        ("deepseek_r1", "", True),
        ("deepseek_r1", "</think>Yes.", True),
        ("minimax_m2", "</think>Yes.", True),
        ("kimi_k2", "<think></think>Yes.", True),
        ("kimi_k2", "Yes.", False),
        ("qwen3", "<think></think>Yes.", False),
        ("olmo3", "</think>Yes.", False),
        ("openai_gptoss", "Yes.", False),
    ],
)
def test_thoughts_that_are_empty_are_told_as_each_model_has_it(name: str, text: str, is_told: bool) -> None:
    parser = find_reasoning_parser(name)(prompt="")
    parser.append(text)
    parser.finish()
    assert parser.is_told_empty is is_told


def test_an_unknown_parser_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1"):
        find_reasoning_parser("nonsense")
