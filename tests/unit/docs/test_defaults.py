"""Defaults and bounds are what the pages say: one table of flags, and the numbers within sentences."""

import argparse
import re
from pathlib import Path

import pytest

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import (
    add_engine_flags,
    add_frontend_flags,
    add_listen_flags,
    add_scheduler_address_flag,
    add_serve_flags,
    add_worker_flags,
    engine_config_from_args,
)
from pagoda_common.config.flags.settings import option_actions
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.speculative_config import speculative_config
from pagoda_common.engine import client, session
from pagoda_common.engine.stream import PATIENCE_S
from pagoda_common.process.heartbeat import PERIOD_S
from pagoda_common.process.supervisor import RestartPolicy
from pagoda_common.rpc.channels import CHANNEL_OPTIONS, MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from pagoda_common.rpc.service import (
    HANDSHAKE_TIMEOUT_MS,
    MAX_CONCURRENT_STREAMS,
    MAX_METADATA_BYTES,
    SERVER_OPTIONS,
)
from pagoda_frontend.requests.embeddings import MAX_INPUTS
from pagoda_frontend.requests.event_ids import MAX_SEQUENCES
from pagoda_scheduler.groups.worker_groups import REGISTRATION_GRACE_S
from pagoda_scheduler.rpc import heartbeats, outbox

DOCS = Path(__file__).parents[3] / "docs"
UNITS = {"": 1, "s": 1, "tokens": 1, "MiB": 1024**2}
WORDS = {"six": 6, "ten": 10, "five": 5, "three": 3, "two": 2, "twice": 2, "a second": 1, "one": 1}
CHANNEL, SERVER = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)


def page(name: str) -> str:
    """Its text in one line, without marks of code."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").replace("`", "").split())


def documented_defaults() -> dict[str, str]:
    section = (DOCS / "cli.md").read_text(encoding="utf-8").split("## Defaults")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`--.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {flag: default for flags, default in rows for flag in re.findall(r"`--([\w-]+)`", flags)}


def value_of(text: str) -> object:
    """What a cell of the table means."""
    if text == "on":
        return True
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    return float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else text


def test_every_flag_that_is_not_off_or_empty_has_its_default_in_the_table() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    documented = documented_defaults()
    assert len(documented) > 40
    actions = option_actions(parser)
    for name, action in actions.items():
        if name in documented:
            default = action.default
            shown = " ".join(default) if isinstance(default, tuple) else default
            assert shown == value_of(documented[name]), name
    listed = {actions[name].dest for name in documented}
    others = [action for action in actions.values() if action.dest not in listed]
    assert [action.dest for action in others if action.default not in (None, False, "", ())] == []


def test_the_table_of_flags_holds_for_services_that_are_started_alone() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_worker_flags(parser)
    assert engine_config_from_args(parser.parse_args([])) == EngineConfig()
    parser = argparse.ArgumentParser()
    add_listen_flags(parser, port=7)
    add_scheduler_address_flag(parser)
    args = parser.parse_args([])
    assert (args.host, args.port, args.scheduler) == ("127.0.0.1", 7, "127.0.0.1:50052")
    parser = argparse.ArgumentParser()
    add_frontend_flags(parser)
    assert parser.parse_args([]).scheduler == "127.0.0.1:50052"


def test_the_help_of_a_flag_names_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    shown = " ".join(parser.format_help().split())
    for flag, default in (("orphan-lease", "30.0"), ("step-watchdog", "2.0"), ("allowed-methods", r"\*")):
        assert re.search(rf"--{flag} [^()]*?\(default: {default}\)", shown), flag


POLICY, ENGINE, FRONTEND = RestartPolicy(), EngineConfig(), FrontendConfig()
SENTENCES = [
    ("architecture.md", r"restarts a dead service after (\S+) s", POLICY.first_delay_s),
    ("architecture.md", r"then \S+ s, and so on up to (\d+) s", POLICY.max_delay_s),
    ("architecture.md", r"has run for (five) seconds", POLICY.healthy_after_s),
    ("architecture.md", r"After (ten) failures in a row", POLICY.max_failures),
    ("architecture.md", r"killed after (six) seconds\s+without\s+one", POLICY.silent_after_s),
    ("architecture.md", r"that a signal has stopped for (a second)", POLICY.stopped_after_s),
    ("architecture.md", r"a step has no answer for (\d+) s", ENGINE.scheduler.step_watchdog_s),
    ("architecture.md", r"without a heartbeat for (ten) seconds", heartbeats.TIMEOUT_S),
    ("architecture.md", r"or for (three) while it has nothing to do", heartbeats.IDLE_TIMEOUT_S),
    ("architecture.md", r"It has (two) seconds to come back", REGISTRATION_GRACE_S),
    ("architecture.md", r"--orphan-lease, (\d+) s", ENGINE.scheduler.orphan_lease_s),
    ("architecture.md", r"/v1/completions with up to (\d+) sequences", MAX_SEQUENCES),
    ("architecture.md", r"once every (\d+) messages", session.ACK_EVERY),
    ("architecture.md", r"Beyond (\d+)\s+unacknowledged messages", 2 * session.ACK_EVERY),
    ("architecture.md", r"messages or (\d+) MiB, and at most", session.ACK_BYTES / 1024**2),
    ("architecture.md", r"and at most (\d+) s late", session.ACK_DELAY_S),
    ("architecture.md", r"With ([\d,]+) unread steps or \d+ MiB", outbox.MAX_UNTAKEN),
    ("architecture.md", r"unread steps or (\d+) MiB", outbox.MAX_UNTAKEN_BYTES / 1024**2),
    ("architecture.md", r"A reader with ([\d,]+) unread messages", outbox.MAX_BACKLOG),
    (
        "architecture.md",
        r"stopped for more than (\d+) s misses",
        (SERVER["grpc.keepalive_time_ms"] + SERVER["grpc.keepalive_timeout_ms"]) / 1000,
    ),
    ("architecture.md", r"--send-timeout \((\d+) s\)", FRONTEND.send_timeout_s),
    ("architecture.md", r"--keep-alive-timeout \((\d+) s\)", FRONTEND.keep_alive_timeout_s),
    ("grpc.md", r"waits up to (\d+) s for it, or until its deadline", FRONTEND.recovery_timeout_s),
    ("grpc.md", r"--orphan-lease \((\d+) s\)", ENGINE.scheduler.orphan_lease_s),
    ("grpc.md", r"for streams of up to (\d+) sequences", MAX_SEQUENCES),
    ("grpc.md", r"frontends wait (\d+) s for the hello", session.HELLO_TIMEOUT_S),
    ("grpc.md", r"frontends wait (\d+) s for the hello and for Adopt", client.ADOPT_TIMEOUT_S),
    ("grpc.md", r"and (\d+) s for GetMetrics", client.METRICS_TIMEOUT_S),
    ("grpc.md", r"Embeddings of up to ([\d,]+) texts", MAX_INPUTS),
    ("grpc.md", r"\| a request \| (\d+) MiB \|", MAX_MESSAGE_BYTES / 1024**2),
    ("grpc.md", r"\| a response \| (\d+) GiB", MAX_ANSWER_BYTES / 1024**3),
    ("grpc.md", r"\| metadata of a call \| (\d+) KiB \|", MAX_METADATA_BYTES / 1024),
    ("grpc.md", r"one connection \| ([\d,]+), further ones", MAX_CONCURRENT_STREAMS),
    ("grpc.md", r"\| handshake \| (\d+) s \|", HANDSHAKE_TIMEOUT_MS / 1000),
    ("grpc.md", r"the server pings every (\d+) s", SERVER["grpc.keepalive_time_ms"] / 1000),
    ("grpc.md", r"does not answer for (\d+) s", SERVER["grpc.keepalive_timeout_ms"] / 1000),
    ("security.md", r"(\d+) MiB per request between services", SERVER["grpc.max_receive_message_length"] / 1024**2),
    ("security.md", r"(\d+) KiB of metadata per call", SERVER["grpc.max_metadata_size"] / 1024),
    ("security.md", r"([\d,]+) concurrent calls per connection", SERVER["grpc.max_concurrent_streams"]),
    ("security.md", r"(\d+) s for a handshake", SERVER["grpc.server_handshake_timeout_ms"] / 1000),
    ("endpoints.md", r"a body has at most (\d+) MiB", FRONTEND.max_request_body_bytes / 1024**2),
    ("endpoints.md", r"Headers have at most (\d+) MiB and \d+ lines", FRONTEND.h11_max_incomplete_event_size / 1024**2),
    ("endpoints.md", r"Headers have at most \d+ MiB and (\d+) lines", FRONTEND.h11_max_header_count),
    ("endpoints.md", r"comment line every (\d+) s", FRONTEND.sse_keep_alive_interval_s),
    ("endpoints.md", r"at most ([\d,]+) inputs, none of\s+them empty", MAX_INPUTS),
    (
        "speculation.md",
        r"(\d+) if neither is given",
        speculative_config({"num_speculative_tokens": 1}).prompt_lookup_max,
    ),
]


@pytest.mark.parametrize(("name", "pattern", "value"), SENTENCES, ids=[f"{name}: {p}" for name, p, _ in SENTENCES])
def test_a_number_in_a_sentence_is_the_one_in_use(name: str, pattern: str, value: float) -> None:
    found = re.search(pattern, page(name))
    assert found, f"docs/{name} no longer says so: adapt the pattern"
    said = WORDS.get(found[1]) or float(found[1].replace(",", ""))
    assert said == value


def test_both_ends_of_a_connection_look_after_it_alike() -> None:
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.keepalive_permit_without_calls"):
        assert CHANNEL[name] == SERVER[name], name
    assert CHANNEL["grpc.max_send_message_length"] == SERVER["grpc.max_receive_message_length"]
    assert CHANNEL["grpc.max_receive_message_length"] == SERVER["grpc.max_send_message_length"]
    assert CHANNEL["grpc.http2.max_pings_without_data"] == 0


def test_waits_within_the_engine_fit_each_other() -> None:
    assert client.MIN_BACKOFF_S < client.MAX_BACKOFF_S <= 0.3, "clients wait for the scheduler meanwhile"
    assert POLICY.silent_after_s > PERIOD_S * 4
    assert ENGINE.scheduler.orphan_lease_s == PATIENCE_S, "a new request and an orphaned one wait alike"
    assert outbox.MAX_UNTAKEN > 4 * session.ACK_EVERY
    assert outbox.MAX_UNTAKEN_BYTES > 4 * session.ACK_BYTES
