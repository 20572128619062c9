"""The caller of the current request, and the memory that the request holds until it is admitted."""

from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Network, ip_address
from urllib.parse import unquote

from pagoda_frontend.budget.held_memory import Hold

ADMITTED_BYTES = 16 * 1024
"""Bytes of an admitted request that its prompt does not account for and that are not counted."""
ADMITTED_TOKEN_BYTES = 48
"""Bytes for each token of the prompt; a number in a list takes 40."""

caller: ContextVar[str] = ContextVar("caller", default="")
"""The accepted key, else the network of the call's address; headers that the caller chooses do not count."""
current_hold: ContextVar[Hold | None] = ContextVar("current_hold", default=None)
"""Memory held by the current call."""


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """The caller that an address stands for: an IPv6 address stands for its network of 64 bits, which has one owner, an
    IPv4 address (in either form) for itself. So does text that is not an address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address) >> 64 << 64, 64)))


def host_of_peer(peer: str) -> str:
    """The host of a gRPC peer, such as `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    _, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]).strip("[]")


def admit_hold(num_prompt_tokens: int) -> None:
    """The request is admitted: from here on the engine's bounds apply to its prompt. Memory that its tokens do not
    account for (a tool that no template shows) is held until the call is over."""
    hold = current_hold.get()
    if hold is not None:
        hold.release(max(0, hold.num_bytes - ADMITTED_BYTES - ADMITTED_TOKEN_BYTES * num_prompt_tokens))


def hold_more(num_bytes: int) -> None:
    """Count memory that the answer takes, until its call is over; raises QueueFull."""
    hold = current_hold.get()
    if hold is not None and num_bytes:
        hold.add(num_bytes)


def held_bytes() -> int:
    """Size in bytes of the request that is being answered; 0 where it was not counted."""
    hold = current_hold.get()
    return 0 if hold is None else hold.num_bytes_seen
