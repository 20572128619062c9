"""Parts of the commands without a server: what serve announces and prints, early checks, options."""

import argparse
import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import COMMANDS, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, make_parser
from pagoda.commands import chat, demo, serve
from pagoda.commands.arguments import CommandParser, _last_value
from pagoda.options.vllm_options import OPTIONS, REFUSED_FLAGS
from pagoda.server import early_checks, local_server
from pagoda.server.local_stack import LocalStack, _within_reach
from pagoda.server.startup_table import StartupTable
from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError, ModelLoadError, PagodaError
from pagoda_common.process.supervisor import BackOff, RestartPolicy, Service, Supervisor

ANNOUNCED = """
Pagoda serves pagoda-tiny; ready in 2.5 s.
  HTTP       http://127.0.0.1:8123/v1
  status     http://127.0.0.1:8123/
  gRPC       127.0.0.1:50123 (pagoda.v1.Inference)
  scheduler  127.0.0.1:50052
Try:
  curl -N http://127.0.0.1:8123/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "pagoda-tiny", "stream": true, "messages": \
[{"role": "user", "content": "Tell me a story about a dog."}]}'
Ctrl-C ends it.
"""
OTHER = """
Pagoda serves it'\\''s; ready in 0.0 s.
  HTTP       https://[::1]:8123/v1
  gRPC       ::1:50123 (pagoda.v1.Inference)
  scheduler  127.0.0.1:50052
Try:
  curl -N https://[::1]:8123/v1/completions -H 'Content-Type: application/json' \
-H "Authorization: Bearer YOUR_API_KEY" \\
    -d '{"model": "it'\\''s", "stream": true, "prompt": "Once upon a time", "max_tokens": 32}'
Ctrl-C ends it.
"""


def stack(model: str = "pagoda-tiny", **fields: Any) -> LocalStack:
    frontend = FrontendConfig(**{"port": 8123, "grpc_port": 50123, "model": model, **fields})
    return LocalStack(engine=EngineConfig(model=ModelConfig(model=model)), frontend=frontend)


def test_the_whole_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.announcement(stack(), seconds=2.5) == ANNOUNCED
    monkeypatch.delenv("PAGODA_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    security = {"ssl_certfile": "c", "api_key": ("k",)}
    other = stack("other", host="::1", served_model_name=("it's", "two"), disable_status_page=True, **security)
    shown = serve.announcement(other, seconds=0.04)
    assert shown == OTHER.replace("serves it'\\''s;", "serves it's;")


@pytest.mark.parametrize(
    ("service", "line", "shown"),
    [
        ("worker", "INFO 09:41:07.512 worker: ready", "worker    | INFO 09:41:07.512 ready"),
        ("worker-1-rank-0", "INFO 1 worker: a worker: b", "worker-1-rank-0 | INFO 1 a worker: b"),
        ("scheduler", "INFO 1 worker: a\x1b[2J", "scheduler | INFO 1 worker: a\\x1b[2J"),
    ],
)
def test_a_line_of_a_service_does_not_name_it_twice(
    capsys: pytest.CaptureFixture[str], service: str, line: str, shown: str
) -> None:
    serve.print_line(service, line)
    assert capsys.readouterr().err == shown + "\n"


def test_json_lines_stay_and_others_become_some(capsys: pytest.CaptureFixture[str]) -> None:
    serve.print_json_line("worker", '{"a": 1}')
    serve.print_json_line("worker", "plain ü")
    printed = capsys.readouterr().err.splitlines()
    assert printed == ['{"a": 1}', '{"service": "worker", "message": "plain ü"}']


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PAGODA_API_KEY": "one, two", "VLLM_API_KEY": "two"}, "$PAGODA_API_KEY"),
        ({"PAGODA_API_KEY": "two, one"}, "YOUR_API_KEY"),
        ({"PAGODA_API_KEY": "x", "VLLM_API_KEY": "one"}, "$VLLM_API_KEY"),
        ({}, "YOUR_API_KEY"),
    ],
)
def test_a_key_is_the_variable_whose_first_key_it_is(environment: dict[str, str], shown: str) -> None:
    assert serve.key_shown(FrontendConfig(api_key=("one",)), environment) == shown
    assert [serve.has_keys(one) for one in (FrontendConfig(), FrontendConfig(api_key=("k",)))] == [False, True]
    assert serve.has_keys(FrontendConfig(api_key_file="f"))


class Running:
    """Stands for a supervisor: ends with a code, or when it is stopped."""

    def __init__(self, code: int | None = None) -> None:
        self.code, self.stopped = code, asyncio.Event()

    async def run(self) -> int:
        if self.code is None:
            await self.stopped.wait()
            return 0
        return self.code

    def stop(self) -> None:
        self.stopped.set()


async def never(*_: Any, **__: Any) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("code", "is_ready", "has_fault", "expected", "said"),
    [
        (2, False, False, 2, ""),
        (1, False, False, 1, ""),
        (None, False, True, 2, "cannot serve pagoda-tiny: no such file"),
        (None, True, False, 0, "Pagoda serves pagoda-tiny"),
    ],
)
async def test_serve_ends_with_the_code_of_what_happened(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
    is_ready: bool,
    has_fault: bool,
    expected: int,
    said: str,
) -> None:
    running = Running(code)
    monkeypatch.setattr(serve, "Supervisor", lambda **_: running)

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    async def at_once(*_: Any, **__: Any) -> str:
        if is_ready:
            asyncio.get_running_loop().call_soon(running.stop)
        return "no such file"

    monkeypatch.setattr(serve, "stop_on_signals", nothing)
    monkeypatch.setattr(serve, "find_load_fault", at_once if has_fault else never)
    monkeypatch.setattr(LocalStack, "wait_until_ready", at_once if is_ready else never)
    with caplog.at_level(logging.ERROR):
        assert await serve.serve(stack()) == expected
    assert said in caplog.text + capsys.readouterr().out


@pytest.mark.parametrize(
    ("log_format", "shown"),
    [
        ("text", ["worker    | INFO 1 ready", 'worker    | {"a": 1}']),
        ("json", ['{"service": "worker", "message": "INFO 1 worker: ready"}', '{"a": 1}']),
    ],
)
@pytest.mark.parametrize("has_table", [False, True])
async def test_serve_shows_the_lines_of_its_services_in_the_log_format(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log_format: Any,
    shown: list[str],
    has_table: bool,
) -> None:
    running = Running()
    marks: list[str | None] = []

    def supervisor(*, services: Any, output: Any) -> Running:
        marks.extend(service.environment.get("PAGODA_STARTUP_MARKS") for service in services)
        for line in ("INFO 1 worker: ready", "startup mark 5.0 weights", '{"a": 1}'):
            output("worker", line)
        return running

    async def at_once(*_: Any) -> None:
        asyncio.get_running_loop().call_soon(running.stop)

    monkeypatch.setattr(serve, "Supervisor", supervisor)
    monkeypatch.setattr(serve, "stop_on_signals", lambda _: nullcontext())
    monkeypatch.setattr(serve, "find_load_fault", never)
    monkeypatch.setattr(LocalStack, "wait_until_ready", at_once)
    one = stack()
    one = replace(one, engine=replace(one.engine, observability=ObservabilityConfig(log_format=log_format)))
    assert await serve.serve(one, StartupTable() if has_table else None) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert [line for line in lines if "startup mark" not in line] == shown
    assert any("startup mark" in line for line in lines) is not has_table, "a table keeps the marks"
    assert (" weights " in printed.out) is has_table
    assert set(marks) == {"1" if has_table else None}


def test_addresses_of_a_stack() -> None:
    assert [_within_reach(host) for host in ("0.0.0.0", "", "::", "1.2.3.4", "localhost")] == [
        *("127.0.0.1", "127.0.0.1", "127.0.0.1", "1.2.3.4", "localhost")
    ]
    own = stack(host="0.0.0.0", grpc_host="10.0.0.1", security=SecurityConfig(insecure=True))
    assert (own.host, own.grpc_address, own.url) == ("127.0.0.1", "10.0.0.1:50123", "http://127.0.0.1:8123")
    assert stack(host="1.2.3.4", security=SecurityConfig(insecure=True)).grpc_address == "1.2.3.4:50123"
    assert (stack().model_name, stack(served_model_name=("a", "b")).model_name) == ("pagoda-tiny", "a")
    private = stack(ssl_certfile="c", ssl_keyfile="k", ssl_ca_certs="a", api_key=("known",)).for_this_process()
    assert (private.frontend.ssl_certfile, private.frontend.ssl_keyfile, private.frontend.ssl_ca_certs) == (None,) * 3
    assert (len(private.frontend.api_key), private.frontend.grpc_host) == (1, "127.0.0.1")
    assert private.frontend.api_key != ("known",)
    assert len(private.frontend.api_key[0]) == 48


async def test_a_stack_tells_each_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str | None] = ["", "a", "a", "", "b", "a", None]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(LocalStack, "_not_ready_reason", lambda self: reasons.pop(0))
    monkeypatch.setattr("pagoda.server.local_stack.asyncio.sleep", sleep)
    told: list[str] = []
    await stack().wait_until_ready(told.append)
    assert (told, slept) == (["a", "b", "a"], [0.1] * 6)


def checked(config: dict[str, Any], ranks: int = 1, asked: int | None = None) -> str:
    try:
        early_checks._check_ranks(config, ranks)
        early_checks._check_context(config, asked)
    except ConfigError as error:
        return f"{error.field}: {error.message}"
    return ""


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        ({"num_attention_heads": 8}, 8, ""),
        ({"num_attention_heads": 8}, 3, "tensor_parallel_size is 3, must divide the model's 8 attention heads"),
        ({"num_key_value_heads": 4}, 2, ""),
        ({"num_key_value_heads": 4}, 8, ""),
        ({"num_key_value_heads": 4}, 6, "is 6, must divide the model's 4 KV heads, or be a multiple of them"),
        ({"num_key_value_heads": 0}, 6, ""),
        ({"intermediate_size": 9}, 3, ""),
        ({"intermediate_size": 10}, 3, "must divide the model's intermediate size, 10"),
        ({"intermediate_size": 10, "num_experts": 2}, 3, ""),
        ({"text_config": {"num_attention_heads": 8}, "num_attention_heads": 9}, 3, "model's 8 attention heads"),
        ({"num_attention_heads": "8"}, 3, ""),
    ],
)
def test_ranks_divide_a_model(config: dict[str, Any], ranks: int, message: str) -> None:
    found = checked(config, ranks)
    assert (message in found) if message else found == ""
    assert found.startswith("tensor_parallel_size: " if message else "")


@pytest.mark.parametrize(
    ("config", "asked", "is_refused"),
    [
        ({"max_position_embeddings": 10}, 10, False),
        ({"max_position_embeddings": 10}, 11, True),
        ({"max_position_embeddings": 10}, None, False),
        ({"max_position_embeddings": 10, "rope_scaling": {"factor": 2}}, 11, False),
        ({"max_position_embeddings": 10, "rope_parameters": {"a": {"factor": 2}}}, 11, False),
        ({"max_position_embeddings": 10, "rope_scaling": None, "rope_parameters": {"theta": 1}}, 11, True),
        ({"text_config": {"max_position_embeddings": 10}}, 11, True),
        ({}, 11, False),
    ],
)
def test_a_context_is_that_of_the_model(config: dict[str, Any], asked: int | None, is_refused: bool) -> None:
    found = checked(config, asked=asked)
    assert found == ("max_model_len: max_model_len is 11, the model was made for 10 tokens" if is_refused else "")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_of_vllm_takes_what_asks_for_nothing(option: Any) -> None:
    option.check(None)
    for value in option.neutral or ():
        option.check(value)
        if not isinstance(value, bool | dict):
            option.check(str(value))
    if option.neutral is None:
        option.check("anything")
        return
    with pytest.raises(ConfigError, match="is not supported: ") as caught:
        option.check("something else")
    assert caught.value.field == option.name
    assert option.reason
    assert option.flags[0] == "--" + option.name.replace("_", "-")


def test_one_is_not_true_and_zero_is_not_false() -> None:
    options = {option.name: option for option in OPTIONS}
    for name, value in (("pipeline_parallel_size", True), ("enable_eplb", 0), ("enable_eplb", True)):
        with pytest.raises(ConfigError):
            options[name].check(value)
    assert not {flag for option in OPTIONS for flag in option.flags} & REFUSED_FLAGS.keys()


def test_the_last_value_of_a_flag_counts() -> None:
    flag = "--config"
    assert _last_value(["--config", "a", "--config=b"], flag) == "b"
    assert _last_value(["--config=a", "--config", "b"], flag) == "b"
    assert _last_value(["--config", "a", "--", "--config", "b"], flag) == "a"
    assert (_last_value(["--config"], flag), _last_value([], flag), _last_value(["--configs=x"], flag)) == (None,) * 3


def test_what_was_given_is_known(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("random-output-len: 5\n")
    words = ["bench", "serve", "--config", str(path), "--input-len=3"]
    parser = make_parser().parse_args(words).parser
    assert isinstance(parser, CommandParser)
    given = [parser.is_given(name) for name in ("random_input_len", "random_output_len", "num_prompts")]
    assert given == [True, True, False]


def test_commands_and_codes() -> None:
    assert [command.name for command in COMMANDS] == [
        *("serve", "demo", "chat", "complete", "run-batch", "bench serve", "bench throughput", "bench latency"),
        *("top", "health", "collect-env", "completion"),
    ]
    assert (EXIT_INTERRUPTED, EXIT_BROKEN_PIPE) == (130, 141)


def test_a_demo_needs_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    class OpenAI:
        def __init__(self, **options: Any) -> None:
            asked.append(options)

        def stream_chat(self, **options: Any) -> Iterator[str]:
            asked.append(options)
            yield from self.texts

        texts: Any = (" ", "Once")

    monkeypatch.setattr(demo, "OpenAIServer", OpenAI)
    assert demo._talk(stack(api_key=("k", "l")), "why?", 7)
    assert asked == [
        {"base_url": "http://127.0.0.1:8123/v1", "api_key": "k"},
        {"messages": [{"role": "user", "content": "why?"}], "model": "pagoda-tiny", "max_tokens": 7},
    ]
    assert capsys.readouterr().out == "> why?\n\n Once\n\n"
    OpenAI.texts = (" ", "\n")
    assert not demo._talk(stack(), "why?", 7)

    def failing() -> Iterator[str]:
        yield "Once"
        raise PagodaError("broken")

    OpenAI.texts = failing()
    assert not demo._talk(stack(), "why?", 7)
    assert "error: broken" in capsys.readouterr().err
    kept: deque[str] = deque(maxlen=2)
    demo._keeper(kept)("worker", "line")
    assert list(kept) == ["worker    | line"]


def test_parameters_of_a_talk_are_those_that_are_given() -> None:
    given = {"max_tokens": 0, "temperature": 0.0, "top_p": None, "seed": 5}
    assert chat._parameters(argparse.Namespace(**given)) == {"max_tokens": 0, "temperature": 0.0, "seed": 5}


def test_children_are_restarted_with_these_pauses() -> None:
    policy = RestartPolicy()
    assert (policy.first_delay_s, policy.max_delay_s, policy.healthy_after_s) == (0.1, 10.0, 5.0)
    assert (policy.silent_after_s, policy.stopped_after_s, policy.max_failures) == (6.0, 1.0, 10)
    service = Service(name="a", command=("true",))
    assert (service.stop_timeout_s, service.environment) == (10.0, {})
    assert len(Supervisor(services=[service, service], output=lambda *_: None).children) == 2


@pytest.mark.parametrize(("uptime_s", "num_failures"), [(4.9, 2), (5.0, 1)])
def test_five_seconds_of_life_forget_a_failure(uptime_s: float, num_failures: int) -> None:
    back_off = BackOff(RestartPolicy())
    back_off.next_delay_s(uptime_s=0)
    assert back_off.next_delay_s(uptime_s=uptime_s) == pytest.approx(0.1 * num_failures)
    assert back_off.num_failures == num_failures


async def test_a_stack_of_one_command_is_ended_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: Any, **__: Any) -> str:
        return "no such file"

    def prepared(code: int | None, *, is_ready: bool, has_fault: bool) -> Running:
        running = Running(code)
        monkeypatch.setattr(local_server, "Supervisor", lambda **_: running)
        monkeypatch.setattr(local_server, "find_load_fault", at_once if has_fault else never)
        monkeypatch.setattr(LocalStack, "wait_until_ready", at_once if is_ready else never)
        return running

    running = prepared(None, is_ready=True, has_fault=False)
    async with local_server.running_stack(stack()) as url:
        assert (url, running.stopped.is_set()) == ("http://127.0.0.1:8123", False)
    assert running.stopped.is_set()
    for code, has_fault, message in (
        (None, True, "cannot serve pagoda-tiny: no such file"),
        (1, False, "cannot serve pagoda-tiny: its services do not keep running"),
    ):
        running = prepared(code, is_ready=False, has_fault=has_fault)
        with pytest.raises(ModelLoadError, match=message):
            async with local_server.running_stack(stack()):
                raise AssertionError("it is not ready")
        assert running.stopped.is_set()
