"""What commands read from flags, the environment and the terminal before they start anything."""

import pytest

from pagoda.cli import main, make_parser
from pagoda.commands import chat, serve
from pagoda.server.local_stack import LocalStack
from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_common.config.frontend_config import FrontendConfig

LONG = '{"pooling_type": "MEAN", "enable_chunked_processing": true}'


@pytest.mark.parametrize(
    ("flags", "environment", "keys"),
    [
        ((), {}, ()),
        ((), {"VLLM_API_KEY": "v\nw"}, ("v", "w")),
        (("--api-key", "f"), {"VLLM_API_KEY": "v"}, ("f",)),
        ((), {"VLLM_API_KEY": "v", "PAGODA_API_KEY": "p"}, ("p",)),
    ],
)
def test_api_keys_come_from_flags_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], environment: dict[str, str], keys: tuple[str, ...]
) -> None:
    for name in ("VLLM_API_KEY", "PAGODA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = make_parser().parse_args(["serve", "--port", "0", "--grpc-port", "0", *flags])
    assert serve.plan(args, args.parser).frontend.api_key == keys


@pytest.mark.parametrize(
    ("pooler_config", "takes_long"), [("", False), ('{"pooling_type": "MEAN"}', False), (LONG, True)]
)
def test_a_frontend_takes_long_inputs_where_the_pooler_divides_them(pooler_config: str, takes_long: bool) -> None:
    engine = EngineConfig(model=ModelConfig(pooler_config=pooler_config))
    planned = LocalStack.plan(engine=engine, frontend=FrontendConfig(port=0, grpc_port=0), scheduler_port=0)
    assert planned.frontend.enable_long_inputs is takes_long


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_flags_of_a_talk_are_numbers(command: str) -> None:
    words = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.25", "--seed", "7"]
    parameters = chat._parameters(make_parser().parse_args([command, *words]))
    assert parameters == {"max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "seed": 7}
    assert chat._parameters(make_parser().parse_args([command])) == {}


@pytest.mark.parametrize(("stdin", "stdout"), [(True, False), (False, True), (False, False)])
def test_a_live_view_needs_a_terminal_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: bool, stdout: bool
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: stdin, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: stdout, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["top"])
    assert ended.value.code == 2
    assert "standard input and output are not a terminal; --once prints one frame" in capsys.readouterr().err
