"""What the fuzzer sends: valid requests, changed at random. A case depends on its seed and number alone."""

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any

MODEL = "pagoda-tiny"
MESSAGES = [{"role": "user", "content": "Hello!"}]
PARTS = [{"type": "text", "text": "y"}, {"type": "text", "text": "z"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}

NO_PLACE = "/nowhere"
FLAGS = ("--enable-lora", "--enable-runtime-lora-updating", f"--allowed-weights={NO_PLACE}")
"""Of the stack, so that it has all endpoints that are asked."""

VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "best_of": 3, "seed": 1, "logprobs": 2}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "echo": True, "stop": ["a", "b"], "stream": True}),
    ("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 5, "logit_bias": {"5": 3}, "bad_words": ["dog"], "min_tokens": 1},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "prompt_logprobs": 1, "truncate_prompt_tokens": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "use_beam_search": True, "n": 2, "length_penalty": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[a-f]{2,5}"}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "user": "u"}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "y"}]},
            ],
            "max_completion_tokens": 3,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
        },
    ),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "tools": [TOOL], "tool_choice": "auto"}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 20,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 20,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
    ),
    ("/v1/responses", {"input": "Hello!", "max_output_tokens": 4}),
    ("/v1/responses", {"input": MESSAGES, "instructions": "x", "max_output_tokens": 4, "stream": True, "store": False}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "system": "x", "stop_sequences": ["z"], "top_k": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/embeddings", {"input": ["Once", "a"], "encoding_format": "base64", "user": "u"}),
    ("/v1/embeddings", {"input": [[5], [6, 7]], "encoding_format": "float", "dimensions": 192, "normalize": True}),
    ("/v1/embeddings", {"input": "Once upon a time", "truncate_prompt_tokens": 2, "truncation_side": "right"}),
    ("/tokenize", {"prompt": "Hello 🙂", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 300]}),
    ("/v1/load_lora_adapter", {"lora_name": "none", "lora_path": f"{NO_PLACE}/none", "load_inplace": True}),
    ("/v1/load_lora_adapter", {"lora_name": "elsewhere", "lora_path": "/etc", "base_model_name": MODEL}),
    ("/v1/unload_lora_adapter", {"lora_name": "none", "lora_int_id": 1}),
    ("/v1/completions", {"model": "none", "prompt": "a", "max_tokens": 2}),
]

# No count between 20 and 2^31: what is a valid number of choices or beams stays small, so that a run ends.
NUMBERS = [0, 1, 2, 3, 17, -1, -2, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, 5e-324]
TEXTS = [
    "",
    " ",
    "\x00",
    "a" * 3000,
    "\ufffd\uffff\U0010ffff",
    "<|im_end|>",
    "{{ x }}",
    "{% for",
    "(a+)+$",
    "[",
    "🙂",
    "-1",
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"": ""}, [0, "a"], 0.5, -0.0, 1.5]
NAMES = [
    *("n", "best_of", "stop", "seed", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "echo"),
    *("stream", "stream_options", "max_tokens", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "tools"),
    *("tool_choice", "response_format", "structured_outputs", "priority", "cache_salt", "request_id", "vllm_xargs"),
    *(
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "chat_template_kwargs",
        "stop_token_ids",
        "timeout",
        "suffix",
        "model",
    ),
    *("lora_name", "lora_path", "load_inplace", "base_model_name"),
    *("messages", "prompt", "tokens", "input", "reasoning_effort", "documents", "continue_final_message", "model"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request over HTTP."""

    path: str
    content: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    hangs_up: bool = False
    """The client goes away after the first bytes of the answer."""


def make_case(seed: int, number: int) -> Case:
    """Case `number` of a run."""
    draw = random.Random(f"{seed}/{number}")
    path, valid = draw.choice(VALID)
    body: Any = {"model": MODEL, **copy.deepcopy(valid)}
    for _ in range(draw.choice([0, 0, 1, 1, 1, 2, 5])):
        body = changed(draw, body)
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    method = "POST"
    kind = draw.random()
    if kind < 0.12:
        content = damaged(draw, content)
    elif kind < 0.15:
        headers = {"Content-Type": draw.choice(["text/plain", "application/xml", "application/json; charset=utf-16"])}
    elif kind < 0.18:
        path = draw.choice([path + "/", path + "%00", path.upper(), "/v1/models/" + "x" * 300, "//", "/v1/../metrics"])
    elif kind < 0.2:
        method = draw.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
    elif kind < 0.23:
        name = draw.choice(["X-Request-Id", "X-Request-Timeout", "X-Vllm-Priority", "Authorization", "X-Tenant-Id"])
        headers[name] = draw.choice(["", "-1", "x" * 500, "1e999", "nan", "{}", "a b", str(2**70)])
    return Case(path, content, method, headers, hangs_up=draw.random() < 0.05)


def changed(draw: random.Random, body: Any) -> Any:
    """`body` with one thing changed, at any depth."""
    places = list(_places(body))
    if not places or draw.random() < 0.15:
        if isinstance(body, dict):
            body[draw.choice(NAMES)] = value(draw)
        return body
    holder, key = draw.choice(places)
    action = draw.random()
    if action < 0.2:
        del holder[key]
    elif action < 0.3:
        holder[key] = [holder[key]] * draw.choice([1, 2, 5])
    elif action < 0.35:
        holder[key] = {draw.choice(NAMES): holder[key]}
    elif action < 0.4 and isinstance(holder[key], str):
        holder[key] = holder[key] * draw.choice([2, 50]) + draw.choice(TEXTS)
    else:
        holder[key] = value(draw)
    return body


def _places(node: Any) -> Any:
    """Every (container, key) within `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in list(items):
        yield node, key
        yield from _places(item)


def value(draw: random.Random) -> Any:
    """Something of any type."""
    pools: list[list[Any]] = [[*NUMBERS], [*TEXTS], OTHERS]
    found: Any = copy.deepcopy(draw.choice(draw.choice(pools)))
    if draw.random() < 0.05:
        for _ in range(draw.choice([3, 70, 200])):
            found = [found] if draw.random() < 0.5 else {"a": found}
    return found


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Bytes with some of them changed, left out or added."""
    raw = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        position = draw.randrange(len(raw) + 1)
        action = draw.randrange(4)
        if action == 0:
            del raw[position : position + draw.randrange(1, 20)]
        elif action == 1:
            raw[position:position] = draw.randbytes(draw.randrange(1, 5))
        elif action == 2:
            raw[position:position] = draw.choice([b"\\ud83d", b"NaN", b"1e999", b"[[[[", b"\x00", b'"', b"{", b"-"])
        else:
            del raw[position:]
    return bytes(raw)


def broken_http(draw: random.Random) -> bytes:
    """Bytes for the HTTP port that are no request, or one that never becomes whole."""
    body = b'{"model": "pagoda-tiny", "prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 400)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + draw.randbytes(100),  # the beginning of TLS
            b"GET / HTTP/9.9\r\n\r\n",
            b"NONSENSE\r\n\r\n",
            head + b"Content-Length: 10\r\n\r\n" + body[:5],
            head + b"Content-Length: -1\r\n\r\n" + body,
            head + b"Content-Length: many\r\n\r\n" + body,
            head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + body,
            head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
            head + b"A" * 70_000,
            head + b"\r\n".join(b"X-%d: 1" % number for number in range(500)) + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(50),
        ]
    )


def broken_frames(draw: random.Random) -> bytes:
    """Bytes for the gRPC port: HTTP/2 with frames that are damaged, cut, or of no kind."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

    def frame(kind: int, payload: bytes, *, announced: int | None = None, stream: int = 1) -> bytes:
        length = len(payload) if announced is None else announced
        flags = draw.randrange(256)
        return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    frames = [frame(draw.randrange(12), draw.randbytes(draw.randrange(60)), stream=draw.randrange(5)) for _ in range(4)]
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 300)),
            preface + draw.randbytes(200),
            preface + settings + b"".join(frames),
            preface + settings + frame(1, draw.randbytes(30)),
            preface + settings + frame(0, b"\x00\xff\xff\xff\xff", announced=2**24 - 1),
            preface + settings + frame(9, draw.randbytes(20)) * 50,
            preface + settings * 100,
            preface[: draw.randrange(1, len(preface))],
        ]
    )
