"""``pagoda run-batch --url``: one result a line, in order, whatever a line is."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import main
from tests.fakes.openai_server import FakeOpenAIServer


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.http.batch.FIRST_RETRY_S", 0.001)


def line(custom_id: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **fields}


def run(
    server: FakeOpenAIServer, folder: Path, lines: list[Any], *flags: str, exit_code: int = 0
) -> list[dict[str, Any]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines))
    words = ["run-batch", "-i", str(source), "-o", str(target), "--url", f"{server.url}/v1", "--disable-tqdm", *flags]
    assert main(words) == exit_code
    return [json.loads(text) for text in target.read_text().splitlines()]


def test_results_have_the_order_of_the_lines(server: FakeOpenAIServer, tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    lines = [line(f"id-{place}", f"prompt {place}") for place in range(40)]
    lines.insert(7, {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    results = run(server, tmp_path, lines, "--max-concurrency", "8")
    assert [result["custom_id"] for result in results] == [text["custom_id"] for text in lines]
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in results)
    assert results[0]["response"]["body"]["choices"][0]["text"] == "w0 w1 w2"
    assert results[7]["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1"
    assert len({result["id"] for result in results}) == len({r["response"]["request_id"] for r in results}) == 41


@pytest.mark.parametrize(
    ("wrong", "custom_id", "code", "message"),
    [
        ("{no json", None, "invalid_json_line", "the line is not JSON"),
        ("[1]", None, "invalid_json_line", "must be a JSON object"),
        ({"url": "/v1/completions", "body": {}}, None, "invalid_request", "custom_id must be a string"),
        (line("x", "a", method="GET"), "x", "invalid_method", "method must be POST, got 'GET'"),
        (line("x", "a", url="/v3/score"), "x", "invalid_url", "url must be one of "),
        (line("x", "a", url="/v1/nothing"), "x", "invalid_url", "url must be one of /v1/chat/completions"),
        (line("x", "a", body=[]), "x", "invalid_request", "body must be an object"),
        (line("x", "a", body={"stream": True}), "x", "invalid_request", "a batch has no streams"),
        (line("first", "a"), "first", "duplicate_custom_id", "is in the batch already"),
    ],
)
def test_a_wrong_line_is_an_error_of_its_own(
    server: FakeOpenAIServer, tmp_path: Path, wrong: Any, custom_id: str | None, code: str, message: str
) -> None:
    is_request = custom_id is not None and "body must be" not in message  # it asks for what is not there
    lines = [line("first", "a"), wrong, "", line("last", "b")]
    first, result, last = run(server, tmp_path, lines, exit_code=0 if is_request else 1)
    assert (first["custom_id"], last["custom_id"]) == ("first", "last")
    assert (first["error"], last["error"]) == (None, None)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == (custom_id, None, code)
    assert message in result["error"]["message"]


def test_texts_of_all_kinds_come_through(server: FakeOpenAIServer, tmp_path: Path) -> None:
    first, second, last = (json.dumps(line(name, "ü")).encode() for name in ("\ud800", "größe", "last"))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([first, second, b"\xff\xfe{}", b"[" * 100_000, last]))
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--disable-tqdm"]) == 1
    results = [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]
    assert [result["custom_id"] for result in results] == ["\ud800", "größe", None, None, "last"]
    codes = [(result["error"] or {}).get("code") for result in results]
    assert codes == [None, None, "invalid_json_line", "invalid_json_line", None]


def test_a_refusal_of_the_server_is_status_and_body(server: FakeOpenAIServer, tmp_path: Path) -> None:
    [result] = run(server, tmp_path, [line("a", "status=404 nope")])
    assert result["response"]["status_code"] == 404
    assert result["response"]["body"]["error"]["message"] == "told to fail with 404"
    assert result["error"] == {"code": "404", "message": "told to fail with 404"}


def test_a_full_server_is_asked_again(server: FakeOpenAIServer, tmp_path: Path) -> None:
    [result] = run(server, tmp_path, [line("a", "retry=3 times")])
    assert (result["response"]["status_code"], server.num_tries["retry=3 times"]) == (200, 4)
    [result] = run(server, tmp_path, [line("a", "status=503 always")])
    assert (result["response"]["status_code"], result["error"]["code"]) == (503, "503")


def test_the_key_is_shown(server: FakeOpenAIServer, tmp_path: Path) -> None:
    run(server, tmp_path, [line("a", "b")], "--api-key", "secret")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


def test_no_server_ends_the_command_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(line("a", "b")))
    target = tmp_path / "out.jsonl"
    words = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(target), "--url", "http://127.0.0.1:1"]
    assert main(words) == 1
    assert "pagoda run-batch: error: no answer from http://127.0.0.1:1" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-i", "/nowhere", "-o", "/tmp/o"), "--input-file /nowhere is not a file"),
        (("-i", __file__, "-o", __file__), "must not be the input file"),
        (("-i", __file__, "-o", "/nowhere/out"), "/nowhere is not a directory"),
        (("-i", __file__, "-o", "/tmp/o", "--max-concurrency", "0"), "--max-concurrency is 0, must be at least 1"),
    ],
)
def test_wrong_files_are_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"x" * 101, "line 2: the line has more than 100 bytes, which is the maximum"),
        (b"x" * 350, "line 2: the line has more than 100 bytes, which is the maximum"),
        (b'{"custom_id": "\xff"}', "line 2: the line is not UTF-8 at byte 15: invalid start byte"),
        (b'{"custom_id": ' + b"1" * 60 + b"}", "line 2: custom_id must be a string, got 1111111111\u2026"),
        (b'{"custom_id": [1, 2]}', "line 2: custom_id must be a string, got [1, 2]"),
        (b'{"custom_id": "' + b"i" * 31 + b'"}', "line 2: custom_id has 31 characters, at most 30 are allowed"),
    ],
)
def test_a_wrong_line_is_named_with_its_bound(
    server: FakeOpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bytes, message: str
) -> None:
    for name, value in (("MAX_LINE_BYTES", 100), ("SKIPPED_BYTES", 50), ("SHOWN_CHARS", 10), ("MAX_ID_CHARS", 30)):
        monkeypatch.setattr(f"pagoda.http.batch.{name}", value)
    good = b'{"custom_id":"%s","url":"/v1/completions","body":{"prompt":"a"}}'
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([good % b"a", wrong, good % b"b"]))
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--url", server.url, "--disable-tqdm"]) == 1
    first, refused, last = [json.loads(text) for text in target.read_text().splitlines()]
    assert (first["custom_id"], first["error"], last["custom_id"], last["error"]) == ("a", None, "b", None)
    assert refused["error"]["message"] == message


def test_deep_nesting_is_named(server: FakeOpenAIServer, tmp_path: Path) -> None:
    [result] = run(server, tmp_path, ["[" * 100_000], exit_code=1)
    assert result["error"]["message"] == "line 1: the line is not JSON: it is nested too deeply"


def test_long_ids_that_repeat_are_found(server: FakeOpenAIServer, tmp_path: Path) -> None:
    lines = [line(name, "a") for name in ("i" * 49, "i" * 50, "i" * 49, "j", "j")]
    codes = [(one["error"] or {}).get("code") for one in run(server, tmp_path, lines)]
    assert codes == [None, None, "duplicate_custom_id", None, "duplicate_custom_id"]


@pytest.mark.parametrize(("name", "value"), [("MAX_PENDING_BYTES", 1), ("MAX_WAITING_EACH", 0)])
def test_few_lines_are_read_ahead_where_they_are_large_or_wait(
    server: FakeOpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(f"pagoda.http.batch.{name}", value)
    results = run(server, tmp_path, [line(f"id-{place}", "a") for place in range(20)])
    assert [one["custom_id"] for one in results] == [f"id-{place}" for place in range(20)]


def test_a_full_disk_is_an_error_that_names_the_file(
    server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a", "b")))
    words = ["run-batch", "-i", str(source), "-o", "/dev/full", "--url", server.url, "--disable-tqdm"]
    assert main(words) == 1
    assert "--output-file /dev/full cannot be written: No space left on device" in capsys.readouterr().err
