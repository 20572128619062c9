"""Structured output: whatever is asked of the form holds, whole or streamed, alone or in a crowd."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, MODEL, PROMPT, Api, Json, chat_body

DIGIT: Json = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, Json] = {
    "an object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested objects": {
        "type": "object",
        "properties": {
            "pet": {
                "type": "object",
                "properties": {"kind": {"enum": ["dog", "cat"]}, "good": {"type": "boolean"}},
                "required": ["kind", "good"],
                "additionalProperties": False,
            }
        },
        "required": ["pet"],
        "additionalProperties": False,
    },
    "an array": {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 2,
        "maxItems": 4,
    },
    "an enumeration": {"enum": ["red", "green", 3, None]},
    "a constant": {"const": "fixed 🙂"},
    "one of two": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "bounds": {"type": "integer", "minimum": -5, "maximum": 5},
    "a reference": {
        "$defs": {"color": {"enum": ["red", "blue"]}},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/color"}, "second": {"$ref": "#/$defs/color"}},
        "required": ["first", "second"],
        "additionalProperties": False,
    },
}


def json_schema(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_answer_matches_its_schema(api: Api, schema: Json, temperature: float) -> None:
    fields: Json = {"max_tokens": 200, "temperature": temperature, "seed": 1, "response_format": json_schema(schema)}
    answer = api.chat("Tell me.", **fields)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert api.stream(CHAT, chat_body("Tell me.", **fields)).text() == choice["message"]["content"]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_so_does_a_completion(api: Api, schema: Json) -> None:
    text = api.text(max_tokens=200, temperature=1.0, seed=2, structured_outputs={"json": schema})
    jsonschema.validate(json.loads(text), schema)
    text = api.text(max_tokens=200, temperature=1.0, seed=3, response_format=json_schema(schema))
    jsonschema.validate(json.loads(text), schema)


def test_a_schema_may_be_given_as_text(api: Api) -> None:
    schema = SCHEMAS["an object"]
    text = api.text(max_tokens=200, structured_outputs={"json": json.dumps(schema)})
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(3))
def test_json_object_is_an_object(api: Api, seed: int) -> None:
    """What is cut by the length is the beginning of one; what ends by itself is one."""
    fields: Json = {"temperature": 0.5, "seed": seed, "response_format": {"type": "json_object"}, "max_tokens": 300}
    [choice] = api.chat("Give me a JSON record of Anna, who is 7.", **fields)["choices"]
    content = choice["message"]["content"]
    assert content.lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(content), dict)


REGEXES = ["[a-f]{3,6}", "(yes|no)", r"\d{4}-\d{2}-\d{2}", "(ab)+c", "[α-ω]{2,4}", "x?y*z", r"\w+@\w+\.com"]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_a_regular_expression_is_matched(api: Api, path: str, regex: str) -> None:
    fields: Json = {"structured_outputs": {"regex": regex}, "temperature": 1.0, "seed": 4, "max_tokens": 60}
    if path == CHAT:
        [choice] = api.chat("Say it.", **fields)["choices"]
        text = choice["message"]["content"]
    else:
        [choice] = api.complete(**fields)["choices"]
        text = choice["text"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(regex, text), text
    else:
        assert text  # cut by the length


CHOICES = {
    "words": ["positive", "negative", "neutral"],
    "one is the beginning of another": ["a", "ab", "abc"],
    "of every script": ["日本🙂é", "שלום", "नमस्ते"],
    "only one": ["The only answer, with a full stop."],
    "with signs of grammars": ['"quoted" \\ | ( [ {', "::= root"],
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("seed", [1, 2])
def test_one_of_the_choices_is_made(api: Api, choices: list[str], seed: int) -> None:
    fields: Json = {"structured_outputs": {"choice": choices}, "temperature": 1.5, "seed": seed, "max_tokens": 80}
    answer = api.complete(**fields)
    [choice] = answer["choices"]
    assert choice["text"] in choices
    assert choice["finish_reason"] == "stop"
    assert api.stream(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, **fields}).text() == choice["text"]


GRAMMARS = {
    "lark": 'start: "SELECT " COLUMN " FROM " TABLE\nCOLUMN: "a" | "b"\nTABLE: "t1" | "t2"\n',
    "ebnf": 'root ::= "SELECT " column " FROM " table\ncolumn ::= "a" | "b"\ntable ::= "t1" | "t2"\n',
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_is_followed(api: Api, grammar: str) -> None:
    text = api.text(structured_outputs={"grammar": grammar}, max_tokens=60, temperature=1.0, seed=1)
    assert re.fullmatch(r"SELECT [ab] FROM t[12]", text), text


@pytest.mark.parametrize("stop", ["🙂", "é", "日本", "bc"], ids=ascii)
def test_a_stop_string_is_found_in_forced_text(api: Api, stop: str) -> None:
    """The characters come in parts of their bytes, token by token."""
    forced = "abc 日本 é 🙂 end"
    fields: Json = {"structured_outputs": {"choice": [forced]}, "max_tokens": 80, "stop": [stop]}
    [choice] = api.complete(**fields)["choices"]
    assert (choice["text"], choice["stop_reason"]) == (forced[: forced.index(stop)], stop)
    stream = api.stream(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, **fields})
    assert stream.text() == choice["text"]


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "🙂🚀", "👩‍👩‍👧", "שלום עולם", "नमस्ते"])
def test_no_piece_of_a_stream_ends_within_a_character(api: Api, text: str) -> None:
    body: Json = {"model": MODEL, "prompt": PROMPT, "structured_outputs": {"choice": [text]}, "max_tokens": 90}
    stream = api.stream(COMPLETIONS, body)
    assert stream.text() == text
    assert not any("\ufffd" in part["text"] for part in stream.choices())


def test_form_and_other_parameters_go_together(api: Api) -> None:
    fields: Json = {
        "structured_outputs": {"regex": "[a-z]{8}"},
        "temperature": 1.0,
        "seed": 1,
        "n": 3,
        "logprobs": 2,
        "presence_penalty": 1.0,
        "top_p": 0.9,
        "logit_bias": {"5": -5},
        "max_tokens": 30,
    }
    for choice in api.complete(**fields)["choices"]:
        assert re.fullmatch("[a-z]{8}", choice["text"])
        assert len(choice["logprobs"]["tokens"]) > 0


def test_32_forms_at_once_beside_free_text(api: Api) -> None:
    free = api.text(max_tokens=30)

    def ask(number: int) -> None:
        if number % 3 == 0:
            assert api.text(max_tokens=30) == free
        elif number % 3 == 1:
            word = f"word {number} 🙂"
            assert api.text(structured_outputs={"choice": [word]}, max_tokens=40) == word
        else:
            schema = SCHEMAS["an object"]
            text = api.text(structured_outputs={"json": schema}, temperature=1.0, seed=number, max_tokens=200)
            jsonschema.validate(json.loads(text), schema)

    with ThreadPoolExecutor(max_workers=32) as pool:
        list(pool.map(ask, range(32)))


BAD: list[tuple[str, Any]] = [
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"regex": ""}),
    ("structured_outputs", {"regex": "a\x00b"}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": "yes"}),
    ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"grammar": "this is none"}),
    ("structured_outputs", {"json": "{"}),
    ("structured_outputs", {"json": {"type": "nothing"}}),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"json_object": False}),
    ("structured_outputs", "text"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}),
    ("response_format", {"type": "poem"}),
    ("response_format", {}),
    ("response_format", "json_object"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[json.dumps(value)[:60] for _, value in BAD])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_a_form_that_is_none_is_refused(api: Api, path: str, field: str, value: Any) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}
    api.refused(path, {**body, field: value}, param=field)


def test_a_schema_that_nests_too_deeply_is_refused(api: Api) -> None:
    schema: Json = {"type": "string"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"model": MODEL, "prompt": PROMPT, "structured_outputs": {"json": schema}}
    api.refused(COMPLETIONS, body, param="structured_outputs")
