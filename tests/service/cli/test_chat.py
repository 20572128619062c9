"""``pagoda chat`` and ``pagoda complete``: one message for scripts, a conversation for people, Ctrl-C for both."""

import builtins
from collections.abc import Iterator

import pytest

from pagoda.cli import main, make_parser
from pagoda.commands.chat import open_server
from pagoda.http.openai_http import OpenAIServer
from tests.fakes.openai_server import FakeOpenAIServer


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What a person types; after it the input ends."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", read)


def test_one_message_for_scripts(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--url", f"{server.url}/v1/", "--max-tokens", "3", "--temperature", "0.5", "--api-key", "k")
    assert main(["chat", "-q", "Hi", "--system-prompt", "Be short.", *flags]) == 0
    assert capsys.readouterr().out == "w0 w1 w2 \n"
    [body] = server.bodies
    assert [message["content"] for message in body["messages"]] == ["Be short.", "Hi"]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("pagoda-tiny", 3, 0.5)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer k"}


def test_thoughts_are_no_part_of_the_answer(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reasoning = "hm "
    type_lines(monkeypatch, "one", "two")
    assert main(["chat", "--url", f"{server.url}/v1", "--max-tokens", "1"]) == 0
    printed = capsys.readouterr()
    assert (printed.out.count("w0 \n"), printed.err) == (2, "hm hm ")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["one", "w0 ", "two"]


def test_complete_sends_the_text_itself(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", f"{server.url}/v1", "--model", "m", "-q", "Once", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "w0 w1 \n"
    assert (server.bodies[0]["prompt"], server.bodies[0]["model"]) == ("Once", "m")


def test_a_conversation_remembers_what_was_said(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "", "status=400 bad", "two")
    assert main(["chat", "--url", f"{server.url}/v1", "--max-tokens", "1"]) == 0
    said = [message["content"] for message in server.bodies[-1]["messages"]]
    assert said == ["one", "w0 ", "two"]  # what failed is forgotten
    assert "error: HTTP 400: told to fail with 400" in capsys.readouterr().err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []

    def interrupted(self: OpenAIServer, **parameters: object) -> Iterator[str]:
        try:
            yield "begun"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(OpenAIServer, "stream_chat", interrupted)
        type_lines(patch, "one", "two")
        assert main(["chat", "--url", f"{server.url}/v1"]) == 0
        assert closed == [True, True]
        assert main(["chat", "--url", f"{server.url}/v1", "-q", "one"]) == 130
    assert capsys.readouterr().out.count("begun\n") == 3


def test_a_url_without_a_path_gets_the_usual_one() -> None:
    urls = {"http://h:1": "http://h:1/v1", "http://h:1/": "http://h:1/v1", "http://h:1/api/v1/": "http://h:1/api/v1"}
    for url, expected in urls.items():
        args = make_parser().parse_args(["chat", "--url", url])
        assert open_server(args).base_url == expected


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1/v1", "-q", "hi"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("pagoda chat: error: no answer from http://127.0.0.1:1/v1")
    assert printed.count("\n") == 1


def test_commands_forget_help_and_end(
    server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "hello", "/clear", "again", "/help", "/nothing", "/exit", "never sent")
    assert main(["chat", "--url", server.url]) == 0
    sent = [body["messages"] for body in server.bodies if "messages" in body]
    assert [[message["content"] for message in messages] for messages in sent] == [["hello"], ["again"]]
    printed = capsys.readouterr().out
    assert "The conversation starts again." in printed
    assert "There is no command /nothing." in printed
    assert printed.count("/clear forgets the conversation") == 2
