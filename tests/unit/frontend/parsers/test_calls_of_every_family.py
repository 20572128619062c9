"""A corpus of what models write, for every registered tool parser: found in a stream as in a whole answer."""

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_frontend.tool_parsers.registry import find_tool_parser, tool_parser_names
from tests.unit.frontend.parsers.test_tool_parsers import SCHEMAS, at_every_split, make, parse

NOW: tuple[str, Any] = ("now", {})
DSML_CALLS = "<｜DSML｜function_calls>\n"
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
)


def dsml(key: str, is_string: str, value: str) -> str:
    return f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>'


CORPUS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "llama3_json",
        'Sure.\n{"name": "now", "parameters": {}}\n{"name": "weather", "parameters": {"days": 1}}, '
        '{"name": "now", "parameters": {}} and so on {x}',
        "Sure. and so on {x}",
        [NOW, ("weather", {"days": 1}), NOW],
    ),
    *(
        (
            name,
            start + '{"type": "function", "function": {"name": "weather", "arguments": {"days": 1}}}',
            "So",
            [("weather", {"days": 1})],
        )
        for name, start in (("llama3_json", "So"), ("hermes", "So<tool_call>"))
    ),
    ("llama4_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>, <tool_call>{"name": "now"}</tool_call>;\nDone, '
        "or not.",
        ";\nDone, or not.",
        [NOW, NOW, NOW],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"a\nb\\"}"}</tool_call> and, '
        '<tool_call>{"name": "now"}',
        " and, ",
        [("weather", {"city": "a\nb"}), NOW],
    ),
    (
        "pythonic",
        "Look: [now(); weather(from='a\nb', class=True,\n days=123456789012345678901)]\n[now()] Done [link](x).",
        "Look: Done [link](x).",
        [NOW, ("weather", {"from": "a\nb", "class": True, "days": 123456789012345678901}), NOW],
    ),
    ("pythonic", "[weather(city='''it's''', units=\"a\" 'b')]", "", [("weather", {"city": "it's", "units": "ab"})]),
    ("pythonic", "[get-it.import(lambda={'a': None})]", "", [("get-it.import", {"lambda": {"a": None}})]),
    ("llama4_pythonic", "Look. <|python_start|>[geo.now(x=1)]<|python_end|>.", "Look..", [("geo.now", {"x": 1})]),
    ("lfm2", "So: <|tool_call_start|>[now()]<|tool_call_end|>\nDone.", "So:\nDone.", [NOW]),
    ("lfm2", "<|tool_call_start|>now()<|tool_call_end|>", "", [NOW]),
    (
        "olmo3",
        "<function_calls>\nweather(city='Rome', days=2)\nnow()\n</function_calls>",
        "",
        [("weather", {"city": "Rome", "days": 2}), NOW],
    ),
    (
        "jamba",
        ' Sure.<tool_calls>[{"name": "now", "arguments": {}},\n  {"name": "now", "arguments": {}}\n]</tool_calls> Ok',
        " Sure.",
        [NOW, NOW],
    ),
    ("hunyuan_a13b", '<tool_calls>[{"name": "now", "arguments": {}}; {"name": "now"},]', "", [NOW, NOW]),
    ("hunyuan", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", [NOW]),
    (
        "minimax",
        'Ok. <tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
        "Ok.",
        [NOW, NOW],
    ),
    (
        "minimax",
        '<tool_calls>\n{"name": "now"}\n{"arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
        '\n{"name": "now"}\n{"arguments": {}}',
        [NOW],
    ),
    ("minimax", "<tool_calls> world content</tool_calls>", " world content", []),
    (
        "internlm",
        'Hm<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"days": 1}}<|action_end|>\n',
        "Hm",
        [("weather", {"days": 1})],
    ),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("granite4", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [NOW]),
    (
        "granite-20b-fc",
        '<function_call> {"name": "now", "arguments": {}}<function_call> {"name": "now"}',
        "",
        [NOW, NOW],
    ),
    ("phi4_mini_json", 'Ok.\nfunctools[{"name": "now", "arguments": {}}]', "Ok.", [NOW]),
    ("ernie45", 'Ok\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', "Ok", [NOW]),
    *(
        (
            name,
            f"<{tag}>I could say {call} here.</{tag}> So:{call}\nDone.",
            f"<{tag}>I could say {call} here.</{tag}> So:\nDone.",
            [NOW],
        )
        for name, tag, call in (
            ("minimax", "think", '<tool_calls>\n{"name": "now", "arguments": {}}\n</tool_calls>'),
            ("seed_oss", "seed:think", "<seed:tool_call><function=now></function></seed:tool_call>"),
            ("hermes", "think", '<tool_call>{"name": "now"}</tool_call>'),
            ("mistral", "think", "[TOOL_CALLS]now[ARGS]{}"),
        )
    ),
    ("hermes", '<think>Never closed <tool_call>{"name": "now"}</tool_call>', "<think>Never closed ", [NOW]),
    ("hermes", " <think>Only thoughts.", " <think>Only thoughts.", []),
    (
        "minimax",
        '<tool_calls>\n{"name": "now", "arguments": {}}\n{no json}\n{"name": "now", "arguments": {}}\n</tool_calls> Ok',
        "{no json} Ok",
        [NOW, NOW],
    ),
    (
        "lfm2",
        "Yes.<|tool_call_start|>[now()]<|tool_call_end|>[now()]<|tool_call_end|> Done",
        "Yes. Done",
        [NOW],
    ),
    ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>[now, or later]", "[now, or later]", [NOW]),
    *(
        (
            "deepseek_v32",
            DSML_CALLS + f'<｜DSML｜invoke name="weather">{parameters}</｜DSML｜invoke>',
            "",
            [("weather", arguments)],
        )
        for parameters, arguments in (
            (dsml("arguments", "false", '{"days": 2}'), {"days": 2}),
            (dsml("input", "true", '{"city": "\\n"}'), {"city": "\n"}),
            (dsml("input", "true", "{days}"), {"input": "{days}"}),
            (dsml("input", "false", '{"a": 1}') + dsml("days", "false", "2"), {"input": {"a": 1}, "days": 2}),
            (dsml("city", "true", "\nA\n") + dsml("days", "false", "2"), {"city": "\nA\n", "days": 2}),
        )
    ),
    (
        "qwen3_coder",
        '<function=weather>\n<parameter=city>\n\nA "b"\n\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>',
        "",
        [("weather", {"city": '\nA "b"\n', "days": 2})],
    ),
    ("longcat", '<longcat_tool_call>{"name": "now"}</longcat_tool_call>', "", [NOW]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}]\n[TOOL_CALLS][{"name": "now", "arguments": {}}] Ok',
        "",
        [NOW, NOW],
    ),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>", "", [NOW]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", "", [NOW]),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true"> 5 \n'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="options" string="false">{"a": [1.10]}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days">3</｜DSML｜parameter></｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [("weather", {"city": " 5 \n", "options": {"a": [1.1]}, "days": 3}), NOW],
    ),
    (
        "deepseek_v4",
        'Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "Hm.\n\n",
        [NOW],
    ),
    *(
        (name, text, text, [])
        for name, text in (
            ("deepseek_v4", f'{DSML_CALLS}<｜DSML｜invoke name="now"></｜DSML｜invoke>\n</｜DSML｜function_calls>'),
            ("deepseek_v32", '<｜DSML｜invoke name="now"></｜DSML｜invoke>'),
            ("deepseek_v4", '<｜DSML｜invoke name="now"></｜DSML｜invoke> '),
            ("gemma4", '<|tool_call>call:weather{city:<|"|>Lond'),
            ("gemma4", '<|tool_call> call:weather{city:"Lond'),
        )
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"><par', '<invoke name="now"><par', []),
    ("kimi_k2", f"Hm. {KIMI[0]} noise {KIMI[2]} and {KIMI[2]}{KIMI[1]} After.", "Hm. ", [NOW, NOW]),
    ("kimi_k2", f"Hm. {KIMI[0]} no call {KIMI[1]} After.", "Hm.  no call  After.", []),
    ("kimi_k2", f"{KIMI[0]} no call", " no call", []),
    ("kimi_k2", f"{KIMI[0]}{KIMI[2].replace(':0', '.0')}{KIMI[2]}{KIMI[1]}", "", [NOW]),
    ("deepseek_v31", "Hm. <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜> After.", "Hm. ", [NOW]),
    (
        "glm45",
        "I look.\n<tool_call>now\n</tool_call>\nAnd \n<tool_call>now</tool_call>",
        "I look.\n\nAnd \n",
        [NOW, NOW],
    ),
    ("glm45", "\n\n<tool_call>now\n</tool_call>", "", [NOW]),
    (
        "granite4",
        'A: \n<tool_call> {"name": "now"} </tool_call> B: \n <tool_call>{"name": "now"}</tool_call> ',
        "A: \n B: \n ",
        [NOW, NOW],
    ),
    ("hunyuan", 'Now. <tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>\nThanks!', "Now. ", [NOW]),
    *(
        ("mistral", text, content, calls)
        for text, content, calls in (
            ('[TOOL_CALLS]  junk [{"name": "now", "arguments":{}}] trail', "", [NOW]),
            ("[TOOL_CALLS] not json at all", "not json at all", []),
            ("[TOOL_CALLS] I cannot {do} that", "I cannot {do} that", []),
            ("[TOOL_CALLS]now or [TOOL_CALLS]now[ARGS]{}", "now or ", [NOW]),
            (f"[TOOL_CALLS]{'no ' * 400}{{}}", f"{'no ' * 400}{{}}", []),
            ('A [TOOL_CALLS] [ {"name": "now", "arguments": {}}]\nextra', "A ", [NOW]),
        )
    ),
    *(
        (
            "gigachat3",
            f'I look. {start}{{"name": "weather", "arguments": {{"days": 1}}}}{end}',
            "I look. ",
            [("weather", {"days": 1})],
        )
        for start in ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>")
        for end in ("", "</s>", "\n</s>\n")
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>", "", [NOW]),
    (
        "minimax_m2",
        '<invoke name="now"></invoke> is no call. <minimax:tool_call>\n<invoke name="weather">\n'
        "<parameter name=\"city\">a < b</parameter>\n<parameter name='days'>2</parameter>\n</invoke>\n"
        "<invoke name=now></invoke>\n</minimax:tool_call>!",
        '<invoke name="now"></invoke> is no call. !',
        [("weather", {"city": "a < b", "days": 2}), NOW],
    ),
    (
        "step3",
        "Hm.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather"><steptml:parameter name="city">Rome</steptml:parameter></steptml:invoke>'
        '<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜> a function",
        "Hm. a function",
        [("weather", {"city": "Rome"}), NOW],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Barcelona</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("weather", {"city": "Barcelona"})],
    ),
    (
        "gemma4",
        'Look. <|tool_call>call:weather{city:<|"|>a {<tool_call|> "b<|"|>,days:108.20,options:{a:[<|"|>x<|"|>,null,-1],'
        "b:{}},is_exact:true}<tool_call|><|tool_call>call:geo.now{}<tool_call|>",
        "Look.",
        [
            (
                "weather",
                {
                    "city": 'a {<tool_call|> "b',
                    "days": 108.2,
                    "options": {"a": ["x", None, -1], "b": {}},
                    "is_exact": True,
                },
            ),
            ("geo.now", {}),
        ],
    ),
    ("gemma4", '<|tool_call>call:weather{"city": "R, }", "days": 2}', "", [("weather", {"city": "R, }", "days": 2})]),
    *(
        (
            name,
            "<tool_call><function=now></function></tool_call>,\n<tool_call><function=now></function>",
            "",
            [NOW, NOW],
        )
        for name in ("qwen3_xml", "qwen3_coder", "mimo", "step3p5")
    ),
    (
        "qwen3_xml",
        "<function=weather><parameter=options>{'a': True, 'n': None, 'l': (1, 'x')}</parameter>"
        "<parameter=other>[1]</parameter></function>",
        "",
        [("weather", {"options": {"a": True, "n": None, "l": [1, "x"]}, "other": "[1]"})],
    ),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>other</arg_key>\n"
        "<arg_value>[1]</arg_value>\n<arg_key>more</arg_key><arg_value>plain text</arg_value></tool_call>",
        "",
        [("weather", {"city": "5", "other": [1], "more": "plain text"})],
    ),
    ("glm47", "<tool_call>now</tool_call><tool_call>now</tool_call>", "", [NOW, NOW]),
    ("openai", "<|channel|>commentary to=functions.now<|message|>{}<|call|>", "", [NOW]),
]
ODD: list[tuple[str, str]] = [
    ("llama3_json", '{"answer": {"name": "now"}, "more": [{"name": "now"}]} {'),
    ("llama3_json", 'Hello {"name": "unknown", "parameters": {}}'),
    ("pythonic", "[f(x=1, x=2)]"),
    ("pythonic", "Look: [unknown(x=1)] and [now(x=1"),
    ("olmo3", "<function_calls> are now and then"),
    ("lfm2", "<|tool_call_start|>now is"),
    ("jamba", "<tool_calls>soon</tool_calls>"),
    ("internlm", "<|action_start|>{}"),
    ("minimax_m2", "<invoke name='now'>"),
    ("step3", '<steptml:invoke name="'),
    ("seed_oss", "<function="),
    ("gemma4", "<|tool_call>cab"),
    ("gemma4", "<|tool_call>call:now"),
    ("deepseek_v4", "<｜DSML｜invoke"),
]


def test_every_parser_has_examples() -> None:
    assert {name for name, *_ in CORPUS} == set(tool_parser_names())


@pytest.mark.parametrize(("name", "text", "content", "calls"), CORPUS)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    whole, random = parse(name, text), Random(text)
    assert whole[1] == content
    assert [(call, json.loads(arguments)) for call, arguments in whole[2]] == calls
    assert parse(name, *text) == whole
    for texts in at_every_split(text):
        assert parse(name, *texts) == whole
    for _ in range(30):
        cuts = sorted(random.sample(range(1, len(text)), 5))
        texts = tuple(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
        assert parse(name, *texts) == whole


@pytest.mark.parametrize(("name", "text"), ODD)
def test_what_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    assert parse(name, text) == parse(name, *text) == ("", text, [])
    for texts in at_every_split(text):
        assert parse(name, *texts) == ("", text, [])


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, *_ in CORPUS])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_stream_of_mangled_calls_is_the_whole_answer(name: str, text: str, data: st.DataObject) -> None:
    """Some of the text is missing or there twice, and it is cut anywhere."""
    start, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    mangled = (
        text[:start] + data.draw(st.sampled_from(["", text[start:end] * 2, "<", '"', "}", "\n", "]"])) + text[end:]
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mangled)), max_size=4)))
    texts = [mangled[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(mangled)], strict=True)]
    whole = parse(name, mangled)
    assert parse(name, *texts) == whole
    assert parse(name, *mangled) == whole


@pytest.mark.parametrize("number", ["1000000000000000000001", "0.1000000000000000000001", "-0.0", "1E+2", "1" * 5000])
def test_numbers_keep_every_digit(number: str) -> None:
    inner = f'{{"n": [{number}]}}'
    texts = {
        "hermes": f'<tool_call>{{"name": "weather", "arguments": {{"options": {inner}}}}}</tool_call>',
        "mistral": f'[TOOL_CALLS]weather[ARGS]{{"options": {inner}}}',
        "qwen3_xml": f"<function=weather><parameter=options>{inner}</parameter></function>",
        "glm45": f"<tool_call>weather<arg_key>options</arg_key><arg_value>{inner}</arg_value></tool_call>",
        "pythonic": f"[weather(options={inner})]",
        "gemma4": f"<|tool_call>call:weather{{options:{{n:[{number}]}}}}<tool_call|>",
        "deepseek_v32": f'{DSML_CALLS}<｜DSML｜invoke name="weather"><｜DSML｜parameter name="options" string="false">'
        f"{inner}</｜DSML｜parameter></｜DSML｜invoke>",
    }
    for name, text in texts.items():
        [(_, arguments)] = parse(name, text)[2]
        assert arguments.lower() == f'{{"options": {inner}}}'.lower(), name


def test_ids_are_mistrals() -> None:
    for text in ("now[ARGS]{}", "now[CALL_ID]call_7[ARGS]{}", '[{"name": "now", "arguments": {}}]'):
        [begin, _] = make("mistral").append(f"[TOOL_CALLS]{text}").tool_calls
        assert re.fullmatch("[A-Za-z0-9]{9}", begin.id or "")
    [begin, _] = make("mistral").append("[TOOL_CALLS]now[CALL_ID]abcDEF789[ARGS]{}").tool_calls
    assert begin.id == "abcDEF789"


def test_strict_calls_begin_as_the_model_was_told_to() -> None:
    for name, text in (("pythonic", "So: [now()]"), ("llama3_json", 'So: {"name": "now", "parameters": {}}')):
        parser = find_tool_parser(name)(schemas=SCHEMAS)
        parser.is_strict = True
        assert parser.append(text).content + parser.finish().content == text


@pytest.mark.parametrize("depth", [150, 900, 5000])
def test_deep_arguments_raise_nothing(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    texts = {
        "hermes": f'<tool_call>{{"function": {{"name": "weather", "arguments": {{"options": {deep}}}}}}}</tool_call>',
        "qwen3_xml": f"<function=weather><parameter=options>{deep}</parameter></function>",
        "glm45": f"<tool_call>weather<arg_key>more</arg_key><arg_value>{deep}</arg_value></tool_call>",
        "pythonic": f"[weather(options={deep})]",
        "gemma4": f"<|tool_call>call:weather{{options:{deep}}}<tool_call|>",
        "deepseek_v32": f'{DSML_CALLS}<｜DSML｜invoke name="weather"><｜DSML｜parameter name="options" string="false">'
        f"{deep}</｜DSML｜parameter></｜DSML｜invoke>",
    }
    for name, text in texts.items():
        content, calls = parse(name, text)[1:]
        assert content or calls, name
