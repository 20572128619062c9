"""What may be plaintext, which files go together, and that no secret shows itself."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.server.local_stack import LocalStack
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import engine_config_to_argv, security_config_to_argv
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.security_config import SecurityConfig, host_of, is_loopback
from pagoda_common.errors import ConfigError
from pagoda_common.process.children import free_port
from pagoda_common.process.watched_files import WatchedFiles
from pagoda_common.rpc.bearer import BearerKeys
from pagoda_common.rpc.credentials import Pem

SECRET = "a-secret-that-nobody-may-see"
TLS = SecurityConfig(tls_cert="c.pem", tls_key="k.pem", tls_ca="ca.pem")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.9.10:1", "localhost:1", "[::1]:1", "::1:1"])
def test_loopback_addresses_may_be_plaintext(address: str) -> None:
    assert is_loopback(host_of(address))
    SecurityConfig().check_dial(address, name="scheduler")
    SecurityConfig().server.check_listen(host_of(address))


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", ":1", "10.0.0.1:1", "localhost.example.com:1", "worker:1"])
def test_others_need_tls_or_insecure(address: str) -> None:
    for plaintext in (SecurityConfig(), SecurityConfig(service_token=SECRET)):
        with pytest.raises(ConfigError, match=r"^scheduler is .*on loopback.*--tls-cert.*--insecure") as caught:
            plaintext.check_dial(address, name="scheduler")
        assert caught.value.field == "scheduler"
        with pytest.raises(ConfigError, match=r"^host is .*loopback.*--tls-cert.*--insecure"):
            plaintext.server.check_listen(host_of(address))
    with pytest.raises(ConfigError, match=r"^scheduler is '10\.0\.0\.1:7'"):
        FrontendConfig(scheduler="10.0.0.1:7")
    for allowed in (TLS, SecurityConfig(insecure=True)):
        FrontendConfig(scheduler="10.0.0.1:7", security=allowed)
        allowed.check_dial(address, name="scheduler")
        allowed.server.check_listen(host_of(address))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tls_cert": "c.pem", "tls_ca": "ca.pem"}, "tls_cert is 'c.pem', must be given with tls_key"),
        ({"tls_key": "k.pem"}, "tls_key is 'k.pem', must be given with tls_cert"),
        ({"tls_cert": "c.pem", "tls_key": "k.pem"}, "tls_cert is 'c.pem', must be given with tls_ca"),
        ({"tls_server_name": "worker"}, "tls_server_name is 'worker', must be given with tls_ca"),
    ],
)
def test_files_go_together(fields: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SecurityConfig(**fields)


def test_a_server_that_checks_clients_has_a_certificate_to_show() -> None:
    with pytest.raises(ConfigError, match=r"tls_ca is 'ca\.pem', must be given with tls_cert"):
        _ = SecurityConfig(tls_ca="ca.pem").server


def test_public_grpc_shows_the_certificate_of_https_or_else_that_of_the_service() -> None:
    plain = FrontendConfig()
    assert plain.public_grpc.cert_file is None
    assert replace(plain, security=TLS).public_grpc.cert_file == "c.pem"
    https = FrontendConfig(security=TLS, ssl_certfile="public.pem")
    assert (https.public_grpc.cert_file, https.public_grpc.key_file) == ("public.pem", "public.pem")
    assert https.public_grpc.client_ca_file is None, "clients have API keys, and no certificates"
    assert replace(https, ssl_ca_certs="clients.pem").public_grpc.client_ca_file == "clients.pem"
    of_service = FrontendConfig(security=TLS, ssl_ca_certs="clients.pem").public_grpc
    assert (of_service.cert_file, of_service.key_file, of_service.client_ca_file) == ("c.pem", "k.pem", "clients.pem")
    with pytest.raises(ConfigError, match=r"ssl_ca_certs is 'clients\.pem', must be given with ssl_certfile"):
        FrontendConfig(ssl_ca_certs="clients.pem")


def test_public_grpc_has_no_token_of_the_services() -> None:
    guarded = FrontendConfig(security=SecurityConfig(service_token=SECRET, service_token_file="tokens"))
    assert (guarded.public_grpc.service_token, guarded.public_grpc.service_token_file) == ("", None)


def plan(**frontend: object) -> LocalStack:
    config = FrontendConfig(port=0, grpc_port=0, **frontend)
    return LocalStack.plan(engine=EngineConfig(), frontend=config, scheduler_port=0)


def test_serve_on_all_interfaces_keeps_plaintext_grpc_on_loopback(caplog: pytest.LogCaptureFixture) -> None:
    stack = plan(host="0.0.0.0")
    assert (stack.frontend.host, stack.frontend.grpc_host) == ("0.0.0.0", "127.0.0.1")
    assert "gRPC is served on 127.0.0.1 only" in caplog.text
    assert "--insecure" in caplog.text


def test_serve_on_all_interfaces_serves_protected_grpc_there() -> None:
    for fields in ({"security": TLS}, {"ssl_certfile": "public.pem"}, {"security": SecurityConfig(insecure=True)}):
        stack = plan(host="0.0.0.0", **fields)
        assert stack.frontend.grpc_host is None
        assert stack.grpc_address.startswith("127.0.0.1:")


def test_serve_gives_every_child_its_security() -> None:
    config = FrontendConfig(port=free_port(), grpc_port=free_port(), security=TLS)
    stack = LocalStack.plan(engine=EngineConfig(security=TLS), frontend=config, scheduler_port=0)
    for service in stack.services():
        assert {"--tls-cert=c.pem", "--tls-key=k.pem", "--tls-ca=ca.pem"} <= set(service.command), service.name


def test_no_secret_in_what_a_config_shows() -> None:
    security = SecurityConfig(service_token=SECRET)
    frontend = FrontendConfig(api_key=(SECRET,), security=security)
    engine = EngineConfig(security=security)
    pem = Pem(b"chain", SECRET.encode(), None)
    for shown in (security, security.server, frontend, frontend.public_grpc, engine, pem, BearerKeys([SECRET])):
        assert SECRET not in repr(shown)
        assert SECRET not in str(shown)
    assert not any(SECRET in word for word in [*engine_config_to_argv(engine), *security_config_to_argv(security)])


def test_keys_of_clients_are_on_no_command_line() -> None:
    keys = ("key-one,with-comma", "-key-two")
    config = FrontendConfig(port=free_port(), grpc_port=free_port(), api_key=keys)
    stack = LocalStack.plan(engine=EngineConfig(), frontend=config, scheduler_port=0)
    assert not any(key in word for service in stack.services() for word in service.command for key in keys)
    (environment,) = (one.environment for one in stack.services() if "PAGODA_API_KEY" in one.environment)
    assert tuple(environment["PAGODA_API_KEY"].splitlines()) == keys


def test_watched_files_are_read_again_when_they_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "number"
    file.write_text("1")

    def read() -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no number", field="number") from error

    watched = WatchedFiles((str(file), None), read)
    assert watched.current() == 1
    file.write_text("22")
    assert watched.current() == 22
    with caplog.at_level(logging.WARNING):
        file.write_text("none")
        assert watched.current() == 22
        assert watched.current() == 22
        assert caplog.text.count("what was read before stays in use") == 1, "said once"
    file.unlink()
    assert watched.current() == 22
    (tmp_path / "new").write_text("333")
    file.symlink_to(tmp_path / "new")
    assert watched.current() == 333
    file.unlink()
    with pytest.raises(ConfigError):
        WatchedFiles((str(file),), read)


def test_ports_and_channels_are_opened_in_one_place() -> None:
    """What opens one by itself is plaintext whatever the flags say. Health asks by itself: it is no service."""
    root = Path(__file__).parents[4]
    opened: set[str] = set()
    for folder in ("services", "common", "client"):
        for file in root.joinpath(folder).rglob("*.py"):
            if re.search(r"\b(insecure_channel|secure_channel|add_insecure_port|add_secure_port)\(", file.read_text()):
                opened.add(file.name)
    assert {"channels.py", "service.py"} <= opened
    assert opened <= {"channels.py", "service.py", "health.py", "health_probe.py"}
