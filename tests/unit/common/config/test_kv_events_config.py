"""--kv-events-config: vLLM's keys and defaults, and what is wrong with others."""

import json
from typing import Any

import pytest

from pagoda_common.config.kv_events_config import KVEventsConfig, kv_events_config
from pagoda_common.errors import ConfigError


def test_nothing_is_published_unless_asked_for_and_defaults_are_those_of_vllm() -> None:
    assert kv_events_config("") == kv_events_config("{}") == KVEventsConfig()
    assert KVEventsConfig() == KVEventsConfig(
        enable_kv_cache_events=False,
        publisher="null",
        endpoint="tcp://127.0.0.1:5557",  # vLLM's port, on loopback alone
        replay_endpoint=None,
        topic="",
        hwm=100_000,
    )


def test_every_key_is_read() -> None:
    values: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:1",
        "replay_endpoint": "tcp://127.0.0.1:2",
        "topic": "kv",
        "hwm": 1,
    }
    assert kv_events_config(json.dumps(values)) == KVEventsConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"publisher": "kafka"}, "publisher is 'kafka', must be null or zmq"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events is 'yes', must be true or false"),
        ({"hwm": 0}, "hwm is 0, must be at least 1"),
        ({"hwm": True}, "hwm is True, must be at least 1"),
        ({"hwm": 1.5}, r"hwm is 1\.5, must be at least 1"),
        ({"endpoint": None}, "endpoint is None, must be a string"),
        ({"replay_endpoint": 5}, "replay_endpoint is 5, must be a string"),
        ({"topics": ""}, "unknown key 'topics', must be one of enable_kv_cache_events, endpoint, hwm"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config: {message}") as caught:
        kv_events_config(json.dumps(values))
    assert caught.value.field == "kv_events_config"
