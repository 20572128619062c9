"""What the process that renders a request's template answers to a job, and which faults are the template's."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagoda_common.text import template_process
from pagoda_common.text.template_process import TOO_MUCH, _answer


def job(source: str, content: Any = "hi", **variables: Any) -> dict[str, Any]:
    continues = variables.pop("continue_final_message", False)
    messages = [{"role": "user", "content": content}]
    return {
        "source": source,
        "messages": messages,
        "continue_final_message": continues,
        "variables": variables,
    }


def test_a_text() -> None:
    source = "{{ a }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert _answer(job(source, a=5)) == {"text": "5[hi]"}
    assert _answer(job(source + ".", a=5, continue_final_message=True)) == {"text": "5[hi"}


def test_faults_are_of_the_template_or_of_the_messages() -> None:
    broken = _answer(job("{% for %}"))
    assert (set(broken), broken["field"]) == ({"error", "field"}, "chat_template")
    assert broken["error"].startswith("the chat template is not valid Jinja: ")
    assert _answer(job("{{ raise_exception('no') }}")) == {
        "error": "the chat template refused the messages: no",
        "field": "messages",
    }
    assert len(_answer(job("{{ raise_exception('n' * 3000) }}"))["error"]) == 2000
    wrong = _answer(job("x", content=5, continue_final_message=True))
    assert wrong["field"] == "messages"
    assert wrong["error"].startswith("the chat template refused the messages: ")


def test_what_takes_too_much_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOO_MUCH == {
        "error": "chat_template takes too much time or memory to be rendered",
        "field": "chat_template",
    }
    monkeypatch.setattr(template_process, "MAX_TEXT_CHARS", 5)
    assert _answer(job("12345")) == {"text": "12345"}
    assert _answer(job("123456")) == TOO_MUCH
    assert _answer(job("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")) == TOO_MUCH

    def out_of_memory(*args: Any, **kwargs: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(template_process, "render_chat_template", out_of_memory)
    assert _answer(job("x")) == TOO_MUCH


def test_jobs_are_bounded_from_before_the_first_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def limit_cpu(seconds: float) -> Iterator[None]:
        bounds.append(("job", seconds))
        yield
        bounds.append(("ended", seconds))

    monkeypatch.setattr(template_process, "limit_memory", lambda size: bounds.append(("memory", size)))
    monkeypatch.setattr(template_process, "limit_cpu", limit_cpu)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(job(text))}\n" for text in "ab")))
    template_process.main()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"is_ready": True},
        {"text": "a"},
        {"text": "b"},
    ]
    assert bounds == [("memory", 512 << 20), *[("job", 2.0), ("ended", 2.0)] * 2]
