"""A client that knows the forms of OpenAI's API: whatever a case gets from it has been checked for its form."""

import json
from collections.abc import Iterator
from typing import Any, Self

import httpx

MODEL = "pagoda-tiny"
MAX_MODEL_LEN = 1024
VOCAB_SIZE = 3072
EOS_TOKEN_IDS = {0, 2}
API_KEYS = ("sk-first", "sk-second")
PROMPT = "Once upon a time"
QUESTION = "Tell me a story about a dog."

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")

Json = dict[str, Any]


class Api:
    """Calls one server with its key; every method raises AssertionError on an answer of the wrong form."""

    def __init__(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {API_KEYS[0]}"}
        self.http = httpx.Client(base_url=url, timeout=240, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ok(self, path: str, body: Json) -> Json:
        """The JSON object of a 200."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("application/json")
        answer: Json = response.json()
        return answer

    def refused(self, path: str, body: Any, *, status: int = 400, param: str | None = None) -> Json:
        """The `error` object of a refusal with this status, and this param where one is given."""
        error = check_error(self.http.post(path, json=body), status)
        if param is not None:
            assert error["param"] is not None, error
            assert error["param"].split(".")[0] == param, error
        return error

    def complete(self, **fields: Any) -> Json:
        """A completion: greedy and eight tokens long unless told otherwise."""
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
        answer = self.ok(COMPLETIONS, body)
        check_answer(answer, id_prefix="cmpl-", kind="text_completion")
        for choice in answer["choices"]:
            assert isinstance(choice["text"], str)
        return answer

    def text(self, **fields: Any) -> str:
        """The text of a completion's only choice."""
        [choice] = self.complete(**fields)["choices"]
        text: str = choice["text"]
        return text

    def chat(self, content: Any = QUESTION, **fields: Any) -> Json:
        """An answer to a question: greedy and eight tokens long unless told otherwise."""
        answer = self.ok(CHAT, chat_body(content, **fields))
        check_answer(answer, id_prefix="chatcmpl-", kind="chat.completion")
        for choice in answer["choices"]:
            message = choice["message"]
            assert message["role"] == "assistant"
            assert message["content"] is None or isinstance(message["content"], str)
        return answer

    def says(self, content: Any = QUESTION, **fields: Any) -> str:
        """The content of a chat answer's only choice."""
        [choice] = self.chat(content, **fields)["choices"]
        text: str = choice["message"]["content"]
        return text

    def stream(self, path: str, body: Json) -> "Stream":
        """A whole stream, read and checked."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(response.text)
            assert response.headers["content-type"].startswith("text/event-stream")
            events = list(server_sent_events(response.iter_lines()))
        assert events[-1] == "[DONE]", "the last event ends the stream"
        return Stream([json.loads(event) for event in events[:-1]], kind=path)

    def token_ids(self, text: str) -> list[int]:
        """The tokens of `text` as it stands in the middle of a text."""
        answer = self.ok("/tokenize", {"model": MODEL, "prompt": text, "add_special_tokens": False})
        token_ids: list[int] = answer["tokens"]
        return token_ids


class Stream:
    """The chunks of one stream, checked for what holds of each."""

    def __init__(self, chunks: list[Json], *, kind: str) -> None:
        name = {COMPLETIONS: "text_completion", CHAT: "chat.completion.chunk"}[kind]
        assert chunks
        for chunk in chunks:
            assert "error" not in chunk, chunk
            assert chunk["object"] == name
            for field in ("id", "created", "model"):
                assert chunk[field] == chunks[0][field]
            for choice in chunk["choices"]:
                assert choice["finish_reason"] in (None, *FINISH_REASONS)
        self.chunks = chunks
        self.is_chat = kind == CHAT

    def choices(self, index: int = 0) -> list[Json]:
        """The parts of one choice, in order."""
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """The whole text of one choice."""
        if self.is_chat:
            return "".join(choice["delta"].get("content") or "" for choice in self.choices(index))
        return "".join(choice["text"] for choice in self.choices(index))

    def finish_reason(self, index: int = 0) -> str:
        """It stands in the last part of the choice and nowhere else."""
        *others, last = (choice["finish_reason"] for choice in self.choices(index))
        assert others == [None] * len(others)
        assert last is not None
        return str(last)

    @property
    def usage(self) -> Json | None:
        """That of the last chunk, which has no choices."""
        last = self.chunks[-1]
        return last.get("usage") if not last["choices"] else None


def chat_body(content: Any = QUESTION, **fields: Any) -> Json:
    """A question; `content` may also be a list of messages."""
    is_messages = isinstance(content, list) and content and "role" in content[0]
    messages = content if is_messages else [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}


def server_sent_events(lines: Iterator[str]) -> Iterator[str]:
    """The data of each event; fails on a line that is neither data, an id, a comment nor the blank between events."""
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        else:
            assert line == "" or line.startswith((":", "id: ")), line


def check_answer(answer: Json, *, id_prefix: str, kind: str) -> None:
    """What every whole answer has."""
    assert answer["id"].startswith(id_prefix)
    assert answer["object"] == kind
    assert answer["model"] == MODEL
    assert answer["created"] > 1_600_000_000
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    for choice in answer["choices"]:
        assert choice["finish_reason"] in FINISH_REASONS
        assert "logprobs" in choice
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_error(response: httpx.Response, status: int) -> Json:
    """The `error` object; its form is that of OpenAI's, with the HTTP status as its code."""
    assert response.status_code == status, f"{response.status_code} {response.text[:1000]}"
    assert response.headers["content-type"].startswith("application/json")
    error: Json = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] == status
    assert "Traceback" not in error["message"]
    return error
