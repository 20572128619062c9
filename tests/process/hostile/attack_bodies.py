"""Attacks by what bodies say: sizes at their bounds and beyond, numbers out of range, bombs in schemas, odd JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

from tests.process.hostile.attack import Attack, Post, post, posts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello!"}]
LONG = "Once upon a time there was a little dog. " * 60
"""Some 600 tokens."""


def complete(**fields: Any) -> Post:
    """A completion of some tokens."""
    return post(COMPLETIONS, {"prompt": "Once", "max_tokens": 8, **fields})


def chat(**fields: Any) -> Post:
    """A chat completion of some tokens."""
    return post(CHAT, {"messages": HELLO, "max_tokens": 8, **fields})


# What is computed.


def beams() -> Iterable[Post]:
    for n in (16, 64, 128):
        yield complete(use_beam_search=True, n=n, prompt=LONG, max_tokens=64, temperature=0)
        yield chat(use_beam_search=True, n=n, messages=[{"role": "user", "content": LONG}], max_tokens=64)


def many_choices() -> Iterable[Post]:
    yield complete(n=128, max_tokens=100, logprobs=20, stream=True)
    yield chat(n=128, max_tokens=100, logprobs=True, top_logprobs=20)
    yield complete(n=128, best_of=128, prompt=[LONG] * 4, max_tokens=4)
    yield complete(n=2, best_of=2**31, max_tokens=4)
    yield complete(prompt=["a"] * 1024, n=16, max_tokens=900, logprobs=20)
    yield complete(prompt=["a"] * 1024, n=16, max_tokens=2)
    yield complete(n=128, prompt=["a"] * 1024, max_tokens=2)


def prompt_logprobs() -> Iterable[Post]:
    yield complete(prompt=[LONG] * 64, prompt_logprobs=20, max_tokens=1)
    yield complete(prompt=LONG, prompt_logprobs=-1, max_tokens=1)
    yield complete(prompt=[LONG] * 16, echo=True, logprobs=20, max_tokens=1)
    yield complete(prompt=LONG, logprobs=-1, max_tokens=64)
    yield chat(messages=[{"role": "user", "content": LONG}], prompt_logprobs=1000)


def endings() -> Iterable[Post]:
    """`stop` and `bad_words` at their bounds."""
    stops = [f"{number:04} " + "a" * 4090 for number in range(128)]
    words = [f"word {number} " + "dog cat " * 30 for number in range(128)]
    yield complete(stop=stops, max_tokens=400, ignore_eos=True, n=16)
    yield chat(stop=["a" * number for number in range(1, 129)], max_tokens=400, ignore_eos=True)
    yield complete(bad_words=words, max_tokens=200, n=16)
    yield complete(bad_words=["a" * 4096] * 128)
    yield complete(stop=["🙂" * 1024] * 128, stream=True, max_tokens=200)
    yield post(MESSAGES, {"messages": HELLO, "max_tokens": 200, "stop_sequences": stops, "stream": True})


def biases() -> Iterable[Post]:
    yield complete(logit_bias={str(number): 1 for number in range(300_000)})
    yield complete(logit_bias={str(number): 1 for number in range(1024)}, n=64, max_tokens=64)
    yield complete(allowed_token_ids=list(range(3072)), n=64, max_tokens=64)
    yield complete(stop_token_ids=list(range(1024)), n=16)
    for number in (-1, 3072, 2**31, 2**32, 2**63, 2**64, 10**30):
        yield complete(prompt=[number])
        yield complete(prompt=[[5], [number]])
        yield complete(logit_bias={str(number): 1})
        yield complete(allowed_token_ids=[number])
        yield complete(stop_token_ids=[number])
        yield complete(logprob_token_ids=[number])
        yield post("/detokenize", {"tokens": [number]})
        yield post("/v1/embeddings", {"input": [number]})
        yield complete(priority=number)
        yield complete(seed=number)
        yield complete(max_tokens=number)
        yield complete(n=number)


def embeddings() -> Iterable[Post]:
    ids = [[5 + (number + place) % 3000 for place in range(255)] for number in range(2000)]
    for _ in range(2):
        yield post("/v1/embeddings", {"input": ids, "encoding_format": "float"})
    yield post("/v1/embeddings", {"input": ["hello " * 200] * 2000, "encoding_format": "base64"})
    yield post("/pooling", {"input": ["hello " * 200] * 500, "task": "token_embed"})
    yield post("/score", {"text_1": "a " * 100, "text_2": ["b " * 200] * 1000})
    yield post("/rerank", {"query": "a " * 100, "documents": ["b " * 200] * 1000})


def texts() -> Iterable[Post]:
    yield post("/tokenize", {"prompt": "a" * 1_000_000, "return_token_strs": True})
    yield post("/tokenize", {"prompt": "🙂" * 260_000, "return_token_strs": True})
    yield post("/tokenize", {"messages": HELLO * 4096})
    yield post("/detokenize", {"tokens": [300] * 65_000})
    yield post("/v1/messages/count_tokens", {"messages": HELLO * 4096})


# Constraints.


def doubling_refs(levels: int) -> dict[str, Any]:
    """A schema whose size doubles with each of its levels, were it written out."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        inner = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels - 1}"}


def nested(levels: int, key: str = "items") -> dict[str, Any]:
    """A schema in a schema."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", key: schema}
    return schema


SCHEMAS: dict[str, dict[str, Any]] = {
    "a cycle of references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a reference to itself": {"$ref": "#"},
    "a cycle below allOf": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "references that double": doubling_refs(40),
    "anyOf that doubles": {"anyOf": [{"anyOf": [{"anyOf": [{"type": "string"}] * 20}] * 20}] * 20},
    "allOf of many": {"allOf": [{"properties": {f"p{number}": {"minLength": 1}}} for number in range(2000)]},
    "deep": nested(190),
    "deeper": nested(400),
    "a huge enum": {"enum": [f"word {number}" for number in range(50_000)]},
    "an enum of long texts": {"enum": ["x" * 4000 + str(number) for number in range(200)]},
    "minItems": {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
    "maxItems": {"type": "array", "items": {"type": "string"}, "maxItems": 10**9},
    "minLength": {"type": "string", "minLength": 10**6},
    "maxLength": {"type": "string", "maxLength": 10**9},
    "minProperties": {"type": "object", "minProperties": 10**6},
    "huge numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 7},
    "many properties": {"type": "object", "properties": {f"p{number}": {} for number in range(20_000)}},
    "required of many": {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(3000)},
        "required": [f"p{number}" for number in range(3000)],
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {f"^{chr(97 + number % 26)}{{{number}}}.*": {"type": "string"} for number in range(90)},
    },
    "a pattern that repeats repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "a pattern with look-ahead": {"type": "string", "pattern": "^(?=.*a)(?=.*b)(?=.*c).{1,500}$"},
    "a long const": {"const": "x" * 100_000},
    "uniqueItems": {"type": "array", "uniqueItems": True, "items": {"enum": list(range(3000))}},
    "if and else": {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": {"not": {}}},
    "not of not": {"not": {"not": {"not": {"type": "string", "pattern": "a{1000}"}}}},
    "a remote reference": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
}
REGEXES = [
    "(a+)+$",
    "(.*)*x",
    "((a{1,100}){1,100}){1,100}",
    "(a|aa)+" * 50,
    "a{1000000000}",
    "[^\\n]{5000,}",
    "(" * 500 + "a" + ")" * 500,
    "(" * 60_000,
    "|".join(f"word{number}" for number in range(20_000)),
    "(?:(?:(?:a?){50}){50}){50}",
    "\\p{L}{1,3000}",
    ".{0,8000}" * 20,
    "(?=a)(?=b)(?<!c)\\1",
    "[" + "a-z" * 30_000 + "]",
]
GRAMMARS = [
    "root ::= root root | root",
    "root ::= " + "( " * 2000 + '"a"' + " )" * 2000,
    "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)) + '\nr60 ::= "a"',
    "\n".join(f'root{n or ""} ::= "a" | root{n + 1}' for n in range(5000)) + '\nroot5000 ::= "b"',
    'root ::= "' + "a" * 60_000 + '"',
    "root ::= [a-z]{1,100000}",
]


def with_schema(schema: Any) -> Iterator[Post]:
    """Every door for a schema."""
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    yield chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}})
    yield complete(structured_outputs={"json": schema})
    yield chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "look"}})
    yield chat(tools=[tool, {**tool, "function": {**tool["function"], "name": "see"}}], tool_choice="required")
    yield post(
        RESPONSES,
        {
            "input": "Hi",
            "max_output_tokens": 8,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}},
        },
    )
    yield post(
        MESSAGES,
        {
            "messages": HELLO,
            "max_tokens": 8,
            "tools": [{"name": "look", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "look"},
        },
    )
    tag = {"begin": "<f>", "schema": schema, "end": "</f>"}
    yield chat(response_format={"type": "structural_tag", "structures": [tag], "triggers": ["<f"]})


def schemas() -> Iterable[Post]:
    for schema in SCHEMAS.values():
        yield from with_schema(schema)


def regexes() -> Iterable[Post]:
    for regex in REGEXES:
        yield complete(structured_outputs={"regex": regex})
        yield complete(guided_regex=regex)
        yield chat(structured_outputs={"regex": regex})
        yield from with_schema({"type": "string", "pattern": regex})
        yield from with_schema({"type": "object", "patternProperties": {regex: {"type": "string"}}})
    for grammar in GRAMMARS:
        yield complete(structured_outputs={"grammar": grammar})
    yield complete(structured_outputs={"choice": [f"choice {number}" for number in range(60_000)]})
    yield complete(structured_outputs={"choice": ["x" * 4000 + str(number) for number in range(500)]})


def tools() -> Iterable[Post]:
    def tool(number: int, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": f"look_{number}", "parameters": {"type": "object"}, **more}}

    for choice in ("auto", "required", "none", {"type": "function", "function": {"name": "look_1"}}):
        yield chat(tools=[tool(number) for number in range(1024)], tool_choice=choice)
        yield chat(tools=[tool(number) for number in range(5000)], tool_choice=choice)
    described = [tool(number, description="d" * 5000) for number in range(1024)]
    yield chat(tools=described, tool_choice="auto")
    yield chat(tools=[tool(1)] * 1024, tool_choice="required")


# JSON and texts.


def raw(path: str, content: bytes) -> Post:
    """A body that a JSON writer does not make."""
    return Post(path, content)


def odd_json() -> Iterable[Post]:
    head = b'{"model": "pagoda-tiny", "max_tokens": 4, '
    for value in (
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"1" * 100_000,
        b"0." + b"1" * 100_000,
        b"1e" + b"9" * 1000,
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\xed\xa0\x80"',
        b'"\xff\xfe"',
        b'"\x00"',
        b'"\\u0000"',
        b"[" * 190 + b"]" * 190,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" + b"[]," * 60_000 + b"[]]",
        b"{" + b",".join(b'"%d":1' % number for number in range(60_000)) + b"}",
        b"{" + b",".join(b'"same":1' for _ in range(60_000)) + b"}",
    ):
        for field in (
            b"prompt",
            b"temperature",
            b"n",
            b"stop",
            b"logit_bias",
            b"vllm_xargs",
            b"user",
            b"stream_options",
        ):
            yield raw(COMPLETIONS, head + b'"prompt": "a", "' + field + b'": ' + value + b"}")
        yield raw(CHAT, head + b'"messages": [{"role": "user", "content": ' + value + b"}]}")
        yield raw(CHAT, head + b'"messages": [{"role": ' + value + b', "content": "a"}]}')
        yield raw(RESPONSES, b'{"max_output_tokens": 4, "input": ' + value + b"}")
        yield raw(MESSAGES, head + b'"messages": [{"role": "user", "content": "a"}], "system": ' + value + b"}")
        yield raw("/tokenize", b'{"prompt": ' + value + b"}")
    yield raw(COMPLETIONS, head + b'"prompt": "a", "prompt": "b", "max_tokens": 1000000}')
    yield raw(COMPLETIONS, b"\xef\xbb\xbf" + head + b'"prompt": "a"}')
    yield raw(COMPLETIONS, (head + b'"prompt": "a"}').decode().encode("utf-16"))
    yield raw(COMPLETIONS, b"null")
    yield raw(COMPLETIONS, b"")


def long_names() -> Iterable[Post]:
    """Texts that become labels, ids, salts or lines of a log."""
    for text in ("x" * 1_000_000, "a\nERROR forged", "\x1b[2J", "\u202eabc", "x" * 1024):
        for field in ("model", "user", "request_id", "cache_salt", "lora_name"):
            yield complete(**{field: text})
            yield chat(**{field: text})
        yield chat(metadata={text: text})
        yield chat(chat_template_kwargs={text: text})
        yield chat(chat_template_kwargs={"messages": text, "tools": text, "bos_token": text, "raise_exception": text})
        yield chat(vllm_xargs={text: text})
        yield chat(chat_template=text)
        yield post(RESPONSES, {"input": "a", "previous_response_id": text, "max_output_tokens": 2})
        yield Post(f"/v1/responses/{text[:2000].encode().hex()}", b"", method="GET")
    for number in range(300):
        yield post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": f"none-{number}"})
        yield Post(COMPLETIONS, complete().content, (("X-Tenant-Id", f"tenant-{number}"),))
        yield Post(f"/v1/none-{number}", b"{}")


def same_ids() -> Iterable[Post]:
    """Requests that are told apart by nothing."""
    for _ in range(40):
        for path, body in (
            (COMPLETIONS, {"prompt": "a", "max_tokens": 30, "stream": True}),
            (CHAT, {"messages": HELLO, "max_tokens": 30}),
            (MESSAGES, {"messages": HELLO, "max_tokens": 30, "stream": True}),
            (RESPONSES, {"input": "Hi", "max_output_tokens": 30}),
        ):
            yield post(path, {**body, "request_id": "same"}, ("X-Request-Id", "same"))


def stored_answers() -> Iterable[Post]:
    """Answers that are kept, with long conversations."""
    for number in range(200):
        message = {"role": "user", "content": f"{number} " + "word " * 20}
        yield post(RESPONSES, {"input": [message] * 10, "max_output_tokens": 1, "metadata": {"a": "b" * 500}})
        yield post(RESPONSES, {"input": "Hi", "max_output_tokens": 4, "background": True, "stream": True})


def adapters() -> Iterable[Post]:
    for number in range(1000):
        path = ("/etc", "/nowhere", "/nowhere/none", "../../etc", "/dev/zero", "/proc/self/mem")[number % 6]
        name = f"adapter-{number}" if number % 2 else "same"
        yield post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": number % 3 == 0})
        yield post("/v1/unload_lora_adapter", {"lora_name": name})
        yield post(COMPLETIONS, {"prompt": "a", "model": name, "structured_outputs": {"regex": "a{3}"}})


ATTACKS: tuple[Attack, ...] = (
    posts("beam searches", beams, repeat=2),
    posts("many choices", many_choices, repeat=2),
    posts("log probabilities of prompts", prompt_logprobs, repeat=4),
    posts("stop strings and bad words", endings, repeat=4),
    posts("biases and token ids", biases, repeat=2),
    posts("embeddings", embeddings, repeat=1),
    posts("long texts", texts, repeat=6),
    posts("schemas", schemas, repeat=1),
    posts("regular expressions", regexes, repeat=1),
    posts("thousands of tools", tools, repeat=4),
    posts("odd JSON", odd_json, repeat=1),
    posts("long names", long_names, repeat=1, concurrency=32),
    posts("requests with the same id", same_ids, repeat=2, concurrency=64),
    posts("stored answers", stored_answers, repeat=1, concurrency=32),
    posts("answers that no one reads", stored_answers, repeat=1, concurrency=64, reads=False),
    posts("adapters", adapters, repeat=1, concurrency=100),
)
