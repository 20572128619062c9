"""Channels between services: encrypted and with a token if configured."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError
from pagoda_common.rpc.credentials import ClientCredentials, Pem
from pagoda_common.rpc.local_token import with_found_token

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest request that a server reads: a prompt of a million tokens fits."""
MAX_ANSWER_BYTES = 1024 * 1024 * 1024
"""Largest answer of one of our own servers: a step with the vocabulary's logprobs of many sequences fits."""
RETIRE_S = 10.0
"""Time that calls on a channel get to end after it was replaced."""

WINDOW_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024 * 1024))
"""Bytes that may be on their way on one stream: a fixed number. Measuring it takes pings of each side, up to ten a
second, which wake four threads beside a step."""

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    *WINDOW_OPTIONS,
    # Retries are ours: every message has an address (epoch, step, offset) and is repeated knowingly.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name, what one attempt may take: round trips of TCP, TLS and HTTP/2 to a far or busy machine.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Channels to a restarted server must not share a broken subchannel's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # A peer that comes back may have another address (a pod, a container): look it up again, not only every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
]


def connect(address: str, *, security: SecurityConfig | None = None) -> grpc.aio.Channel:
    """A channel to ``host:port`` or an abstract socket; made once and kept. It connects lazily, and again by itself.

    Raises:
        ConfigError: a file of `security` cannot be used, or the address is not on loopback and nothing protects it.
    """
    return _open(address, ClientCredentials(security or SecurityConfig()))


def connect_blocking(address: str, *, security: SecurityConfig) -> grpc.Channel:
    """As `connect`, for programs without asyncio. It shows no token: only health answers.

    Raises:
        ConfigError: as in `connect`.
    """
    security.check_dial(address, name="address")
    credentials, options = _transport(ClientCredentials(security))
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


class Connection:
    """A channel to an address for a whole life: `renew` takes up certificates that have changed since."""

    def __init__(self, address: str, *, security: SecurityConfig | None = None) -> None:
        """Raises ConfigError as `connect` does."""
        self.address = address
        self._credentials = ClientCredentials(security or SecurityConfig())
        self._credentials.config.check_dial(address, name="address")
        self._channel: grpc.aio.Channel | None = None
        self._used: Pem | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def renew(self) -> grpc.aio.Channel:
        """The channel for what comes next. Called when nothing runs over the one before, which may be replaced."""
        pem = self._credentials.pem()
        if self._channel is None or pem is not self._used:
            if self._channel is not None:
                task = asyncio.create_task(self._channel.close(RETIRE_S))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
            self._channel, self._used = _open(self.address, self._credentials), pem
        return self._channel

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """The channel that `renew` gave last; None before, and after `close`."""
        return self._channel

    async def close(self) -> None:
        """End it, with all calls."""
        channel, self._channel = self._channel, None
        for task in list(self._retiring):
            task.cancel()
        if channel is not None:
            await channel.close()


def _open(address: str, credentials: ClientCredentials) -> grpc.aio.Channel:
    credentials.config.check_dial(address, name="address")
    config = with_found_token(credentials.config, address)
    if config is not credentials.config:
        with contextlib.suppress(ConfigError):  # it is gone again
            credentials = ClientCredentials(config)
    transport, options = _transport(credentials)
    if transport is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, transport, options=options)
    return _TokenChannel(channel, credentials.metadata) if credentials.metadata() else channel


def _transport(credentials: ClientCredentials) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, int | str]]]:
    """Credentials (None is plaintext) and options of a channel."""
    pem, name = credentials.pem(), credentials.config.tls_server_name
    if pem.ca is None:
        return None, CHANNEL_OPTIONS
    options = CHANNEL_OPTIONS if name is None else [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.chain), options


class _TokenChannel(grpc.aio.Channel):
    """Shows a token with every call.

    Not an interceptor: those pass each message of a stream through a queue of their own. Not call credentials: they
    refuse plaintext, which --insecure allows.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._showing(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._showing(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._showing(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._showing(self._channel.stream_stream(*args, **kwargs))

    def _showing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def show(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._metadata()), **kwargs)

        return show

    async def __aenter__(self) -> "_TokenChannel":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()
