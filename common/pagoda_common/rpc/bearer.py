"""Bearer keys: who shows one may call. Compared in constant time, read from files of one key a line. Knows no gRPC."""

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from pagoda_common.errors import ConfigError


class BearerKeys:
    """The keys that open something."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def allow(self, headers: Mapping[str, str], *, key_header: str | None = None) -> bool:
        """Whether `headers` (lower-case names) show one of the keys as bearer token, or plainly in `key_header`."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = [token.strip()] if scheme.lower() == "bearer" else []
        if key_header is not None:
            shown.append(headers.get(key_header, "").strip())
        given = [sha256(_raw(key)).digest() for key in shown]
        # Every digest is compared, in constant time: neither length nor order of the keys leaks.
        matches = [hmac.compare_digest(one, digest) for one in given for digest in self._digests]
        return any(matches)


def read_keys(file: str, *, field: str) -> tuple[str, ...]:
    """The keys in `file`, one a line; empty lines and lines that begin with # are left out.

    Raises:
        ConfigError: the file (of `field`) cannot be read, or has no key: it would leave everything open.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field} {file!r} cannot be read: {error}", field=field) from error
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{field} {file!r} has no key", field=field)
    return keys


def _raw(value: str) -> bytes:
    """The bytes that came over the wire (HTTP headers are decoded as latin-1)."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()
