"""Requests that have grown: each field of valid ones, alone and with others, to sizes around its bound and far beyond.

A case depends on its seed and number alone, as those of `fuzz_cases`, which change what fields say, not their length.
"""

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagoda.v1 import inference_pb2
from pagoda_frontend.budget.fields import BOUNDS
from tests.process.hostile.fuzz_cases import MODEL, NAMES, VALID

SIZES = [2, 17, 129, 1025, 4097, 20_000, 70_000, 600_000]
TEXTS = ["a", " ", "hello ", '"', "\\", "\n", "🙂", "9", "<|im_end|>", "{{", "(a?)", "[", "\x00"]
ITEMS: list[Any] = [1, "", "a", {}, [], None, {"role": "user", "content": "x"}, {"type": "text", "text": "x"}, 1e300]
MAX_PLACE_DEPTH = 6
MAX_BYTES = 3_000_000
"""Of a case: what comes from a client of this test; the bounds of the server are below and above it."""


@dataclass(frozen=True, slots=True)
class Grown:
    """One request."""

    name: str
    """What has grown, for reports."""
    path: str
    """Of HTTP, or a method of pagoda.v1.Inference."""
    content: bytes
    is_grpc: bool = False


def grown_case(seed: int, number: int) -> Grown:
    """Case `number` of a run."""
    draw = random.Random(f"grown {seed}/{number}")
    return _message(draw) if draw.random() < 0.25 else _body(draw)


def _body(draw: random.Random) -> Grown:
    path, valid = draw.choice(VALID)
    body: dict[str, Any] = {"model": MODEL, **copy.deepcopy(valid)}
    grown = []
    for number in range(draw.choice([1, 1, 1, 2, 3])):
        names = sorted({*body, draw.choice(NAMES), draw.choice(list(BOUNDS))})
        places: list[tuple[str, Any, Any]] = [("body", body, name) for name in names]
        if number == 0:  # what has grown is one thing many times: to let that grow would be out of all bounds
            places += [place for name, value in body.items() for place in _places(value, name)]
        name, holder, key = draw.choice(places)
        present = holder.get(key) if isinstance(holder, dict) else holder[key]
        holder[key] = _grown(draw, present)
        grown.append(f"{name}.{key}")
    content = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode(errors="replace")
    return Grown(f"{path} {', '.join(grown)}", path, content[:MAX_BYTES] if len(content) > MAX_BYTES else content)


def _places(node: Any, name: str, depth: int = 0) -> list[tuple[str, Any, Any]]:
    """Places within what is a valid value; of one that has grown already, its first ones."""
    found: list[tuple[str, Any, Any]] = []
    for key in list(node)[:8] if isinstance(node, dict) else range(len(node[:3])) if isinstance(node, list) else ():
        found.append((name, node, key))
        if depth < MAX_PLACE_DEPTH:
            found += _places(node[key], f"{name}.{key}", depth + 1)
    return found


def _grown(draw: random.Random, value: Any) -> Any:
    """Something long in the place of `value`, of its type or of another."""
    size = draw.choice(SIZES)
    kind = draw.random()
    if kind < 0.3 or (isinstance(value, str) and kind < 0.5):
        text = draw.choice(TEXTS)
        return text * min(size * 4, MAX_BYTES // len(text.encode()) // 2)
    if kind < 0.4:
        return {f"k{number}": draw.choice(ITEMS) for number in range(min(size, 100_000))}
    if kind < 0.5:
        deep: Any = 1
        for _ in range(min(size, 900)):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    item = value[0] if isinstance(value, list) and value and draw.random() < 0.6 else draw.choice(ITEMS)
    if draw.random() < 0.1:
        item = [item] * 20
    return [item] * min(size, MAX_BYTES // (len(json.dumps(item)) + 2))


MESSAGES: list[tuple[str, Message]] = [
    ("GenerateUnary", inference_pb2.GenerateRequest(text="Once")),
    ("GenerateUnary", inference_pb2.GenerateRequest(token_ids={"ids": [5, 6]})),
    ("ChatUnary", inference_pb2.ChatRequest(messages=[{"role": "user", "content": "Hi"}], tools=[{"name": "look"}])),
    ("Embed", inference_pb2.EmbedRequest(inputs=[{"text": "Once"}])),
    ("Abort", inference_pb2.AbortGenerationRequest(request_ids=["x"])),
    ("Tokenize", inference_pb2.TokenizeRequest(text="Once", return_token_strs=True)),
    ("Tokenize", inference_pb2.TokenizeRequest(messages=[{"role": "user", "content": "Hi"}])),
    ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[300, 301])),
]


def _message(draw: random.Random) -> Grown:
    method, valid = draw.choice(MESSAGES)
    message = copy.deepcopy(valid)
    if "sampling_params" in message.DESCRIPTOR.fields_by_name:
        message.sampling_params.max_tokens = 2  # type: ignore[attr-defined]
    grown = []
    for _ in range(draw.choice([1, 1, 2])):
        holder, field = draw.choice(list(_fields(message)))
        _grow_field(draw, holder, field)
        grown.append(field.full_name)
    return Grown(f"{method} {', '.join(grown)}", method, message.SerializeToString(), is_grpc=True)


def _fields(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    """Every field that can be long, of a message and of those in it."""
    found = []
    for field in message.DESCRIPTOR.fields:
        is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        if field.is_repeated or is_text:
            found.append((message, field))
        if field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            found += _fields(getattr(message, field.name))
        elif field.message_type is not None and field.is_repeated and not field.message_type.GetOptions().map_entry:
            found += [inner for one in list(getattr(message, field.name))[:2] for inner in _fields(one)]
    return found


def _grow_field(draw: random.Random, holder: Message, field: FieldDescriptor) -> None:
    size = draw.choice(SIZES)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        getattr(holder, field.name).update(dict.fromkeys(range(size), 1.0))
    elif kind is not None:
        getattr(holder, field.name).extend([kind._concrete_class()] * min(size, 100_000))  # type: ignore[attr-defined]
    elif field.is_repeated and field.type == FieldDescriptor.TYPE_STRING:
        getattr(holder, field.name).extend([draw.choice(["", "a", "a" * 50])] * min(size, MAX_BYTES // 60))
    elif field.is_repeated:
        getattr(holder, field.name).extend([300] * size)
    else:
        text = draw.choice(["a", " ", "9", "[", '{"a":', "🙂"])
        setattr(holder, field.name, text * min(size * 4, MAX_BYTES // len(text.encode()) // 2))
