"""Counts the values of a JSON text while its bytes arrive, to refuse a costly one before it is parsed. Parses nothing.

A parser needs a microsecond for a text or a list, and holds the interpreter until it ends: parsing 5 MB of `{},{},…`
and building objects from it takes seconds.
"""

from pagoda_common.errors import InvalidRequest

MAX_VALUES = 512 * 1024
"""Maximum number of values in a JSON text: numbers, texts, lists and all others."""
MAX_TEXTS = 64 * 1024
"""Maximum number of texts (field names included), lists and objects: each costs about ten times as much as a number."""
SLICE_BYTES = 64 * 1024
"""Bytes that are scanned in one go, in less than a millisecond."""

_STRUCTURE = b'",[{'
_OTHER_BYTES = bytes(set(range(256)) - set(_STRUCTURE))


class JsonScan:
    """The counts of one JSON text."""

    __slots__ = ("_ends_in_backslash", "_is_in_text", "max_values", "num_containers", "num_texts", "num_values")

    def __init__(self, *, max_values: int = MAX_VALUES) -> None:
        """`max_values`: the bound on values, where it differs from the default."""
        self.max_values = max_values
        self.num_values = 1
        """Values so far: exact, except that empty lists and objects count too much."""
        self.num_texts = 0
        """Texts that have ended, names of fields included."""
        self.num_containers = 0
        """Lists and objects that have begun."""
        self._is_in_text = False
        self._ends_in_backslash = False

    def feed(self, data: bytes) -> None:
        """Count the values in the next bytes.

        Raises:
            InvalidRequest: there are more values than the bounds allow.
        """
        for start in range(0, len(data), SLICE_BYTES):
            self._count(data[start : start + SLICE_BYTES])
            self._check()

    def _count(self, piece: bytes) -> None:
        if self._ends_in_backslash:
            piece = b"\\" + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._ends_in_backslash = bool(num_backslashes % 2)
        if self._ends_in_backslash:
            piece = piece[:-1]
        if b"\\" in piece:  # without escaped quotes and backslashes, every quote begins or ends a text
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.translate(None, _OTHER_BYTES).split(b'"')
        outside = b"".join(parts[self._is_in_text :: 2])
        num_quotes = len(parts) - 1
        self.num_texts += (num_quotes + self._is_in_text) // 2
        self._is_in_text ^= bool(num_quotes % 2)
        num_commas = outside.count(b",")
        self.num_containers += len(outside) - num_commas
        self.num_values += len(outside)

    def _check(self) -> None:
        if self.num_values > self.max_values:
            raise InvalidRequest(f"the request body has more than {self.max_values} values")
        if self.num_texts + self.num_containers > MAX_TEXTS:
            raise InvalidRequest(f"the request body has more than {MAX_TEXTS} texts, lists and objects")


def scan(text: str | bytes) -> None:
    """Check a whole JSON text; raises as `JsonScan.feed`."""
    JsonScan().feed(text.encode(errors="surrogatepass") if isinstance(text, str) else text)
