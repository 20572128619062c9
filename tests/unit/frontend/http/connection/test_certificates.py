"""HTTPS takes what its files hold: once for each change, and nothing while a pair does not fit."""

import asyncio
import ssl
from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_frontend.http.connection import https


class Files:
    """Gives one content after the other, the last one again and again."""

    def __init__(self, *contents: object) -> None:
        self.contents = list(contents)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> "Files":
        self.asked.append(given)
        return self

    def current(self) -> object:
        return self.contents.pop(0) if len(self.contents) > 1 else self.contents[0]


class Context:
    """Notes what is loaded; refuses the first `num_refusals` pairs."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.loaded: list[tuple[str, ...]] = []
        self.num_refusals = num_refusals

    def load_cert_chain(self, cert: str, key: str) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise ssl.SSLError("key values mismatch")
        self.loaded.append((cert, key))

    def load_verify_locations(self, ca: str) -> None:
        self.loaded.append((ca,))


async def follow(
    monkeypatch: pytest.MonkeyPatch, files: Files, context: Context, *, num_looks: int, **config: Any
) -> list[float]:
    """Follow for so many looks; how long it waited for each."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > num_looks:
            raise asyncio.CancelledError

    monkeypatch.setattr(https, "pem_files", files)
    monkeypatch.setattr(https.asyncio, "sleep", sleep)
    settings = FrontendConfig(scheduler="127.0.0.1:1", **config)
    with pytest.raises(asyncio.CancelledError):
        await https.follow_certificate(cast("ssl.SSLContext", context), settings)
    return waits


A, B, C = "first", "second", "third"


async def test_a_change_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    context, files = Context(), Files(A, A, B, B, C)
    config = {"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "ca"}
    assert await follow(monkeypatch, files, context, num_looks=8, **config) == [1.0] * 9
    assert context.loaded == [("cert", "key"), ("ca",)] * 2
    assert files.asked == [{"cert": "cert", "key": "key", "ca": "ca"}]


async def test_a_file_may_hold_both_and_no_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    context, files = Context(), Files(A, B)
    await follow(monkeypatch, files, context, num_looks=2, ssl_certfile="both")
    assert context.loaded == [("both", "both")]
    assert files.asked == [{"cert": "both", "key": "both", "ca": None}]


async def test_a_pair_that_does_not_fit_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(num_refusals=2)
    await follow(monkeypatch, Files(A, B), context, num_looks=2, ssl_certfile="both")
    assert context.loaded == []
    context = Context(num_refusals=2)
    await follow(monkeypatch, Files(A, B), context, num_looks=5, ssl_certfile="both")
    assert context.loaded == [("both", "both")]


async def test_what_stays_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context()
    await follow(monkeypatch, Files(A), context, num_looks=5, ssl_certfile="both")
    assert context.loaded == []
