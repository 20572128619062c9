"""Finds endless header blocks of HTTP/2 in a piece of what a client sends. Knows frames (RFC 9113); no sockets."""

import re
from collections.abc import Iterable
from re import Pattern

MAX_FRAME_BYTES = 16_384
"""Largest payload of a frame: what our servers allow."""
MAX_BLOCK_BYTES = 64 * 1024
"""A longer header block is endless; calls with half of it are refused."""
MAX_BLOCK_FRAMES = 1_000
"""A block of more frames is endless, too."""
SEEN_BYTES = 2 * MAX_BLOCK_BYTES
"""So much of a connection is enough to tell."""

_HEAD_BYTES = 9
_END_HEADERS = 0x04
_DATA, _CONTINUATION = 0, 9


def _heads(kind: int, flags: Iterable[int], *, length: bytes = b"") -> Pattern[bytes]:
    """Every place where the head of such a frame of a client could begin; its stream has an odd number."""
    allowed = b"".join(re.escape(bytes([value])) for value in flags)
    odd = b"".join(re.escape(bytes([value])) for value in range(1, 256, 2))
    kinds = re.escape(bytes([kind]))
    return re.compile(rb"(?=%b\x00[\x00-\x40].%b[%b][\x00-\x7f]..[%b])" % (length, kinds, allowed, odd), re.DOTALL)


_CONTINUATIONS = _heads(_CONTINUATION, (flags for flags in range(256) if not flags & _END_HEADERS))
_CONTENTS = _heads(_DATA, (0, 1), length=rb"(?!\x00\x00\x00)")


def has_endless_block(piece: bytes) -> bool:
    """Whether `piece`, which begins anywhere in a frame, can be read as part of an endless header block.

    Content can look like that, too: `can_be_messages` tells whether there may be content.
    """
    known: set[int] = set()
    for found in _CONTINUATIONS.finditer(piece, 0, MAX_FRAME_BYTES + 2 * _HEAD_BYTES):
        start = place = found.start()
        stream = piece[place + 5 : place + 9]
        for num_frames in range(1, MAX_BLOCK_FRAMES + 2):
            if place - start > MAX_BLOCK_BYTES or num_frames > MAX_BLOCK_FRAMES:
                return True
            head = piece[place : place + _HEAD_BYTES]
            is_part = len(head) == _HEAD_BYTES and head[3] == _CONTINUATION and not head[4] & _END_HEADERS
            if place in known or not is_part or head[5:] != stream or _length(head) > MAX_FRAME_BYTES:
                break
            known.add(place)
            place += _HEAD_BYTES + _length(head)
    return False


def can_be_messages(piece: bytes) -> bool:
    """Whether `piece`, which begins anywhere in a frame, can be read as frames of which one has content of a client."""
    known: set[int] = set()
    for found in _CONTENTS.finditer(piece, 0, MAX_FRAME_BYTES + 2 * _HEAD_BYTES):
        place = found.start()
        while place not in known:
            head = piece[place : place + _HEAD_BYTES]
            if len(head) < _HEAD_BYTES:
                return True
            if _length(head) > MAX_FRAME_BYTES or head[3] > _CONTINUATION:
                break
            known.add(place)
            place += _HEAD_BYTES + _length(head)
    return False


def _length(head: bytes) -> int:
    return int.from_bytes(head[:3], "big")
