"""Bearer keys, which give access to calls: compared in constant time, read from files with one key per line. Knows no
gRPC."""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from pagoda_common.errors import ConfigError

MAX_SHOWN_KEYS = 8
"""Maximum per call; further keys are ignored."""
ID_CHARS = 16


class BearerKeys:
    """The keys that open something."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepted(self, headers: Iterable[tuple[str, Any]], *, key_header: str | None = None) -> str | None:
        """The id of the key that `headers` show: one of ours, as bearer token or plainly in `key_header`.

        What else the headers hold, such as the credentials of a proxy, has no say in it. Of several of our keys, the
        first bearer token counts.

        Args:
            headers: pairs of a lower-case name and a value; a name may occur more than once. Bytes are no keys.

        Returns:
            The beginning of the key's digest, as `key_id` has it; None when there is none of ours.
        """
        bearers, plain = [], []
        for name, value in headers:
            if not isinstance(value, str):
                continue
            if name == "authorization":
                scheme, _, token = value.partition(" ")
                if scheme.lower() == "bearer":
                    bearers.append(token.strip())
            elif name == key_header:
                plain.append(value.strip())
        given = [sha256(_raw(key)).digest() for key in [*bearers, *plain][:MAX_SHOWN_KEYS]]
        # Every digest is compared, in constant time: neither length nor order of the keys leaks.
        matches = [[hmac.compare_digest(one, digest) for digest in self._digests] for one in given]
        return next((one.hex()[:ID_CHARS] for one, found in zip(given, matches, strict=True) if any(found)), None)


def key_id(key: str) -> str:
    """The id of a key, as from `BearerKeys.accepted`: not secret, and the same for every call."""
    return sha256(key.encode()).hexdigest()[:ID_CHARS]


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
