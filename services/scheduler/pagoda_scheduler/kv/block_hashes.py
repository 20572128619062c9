"""BlockHasher: identifies blocks by their content. Knows the tokens of requests; no blocks."""

from array import array
from hashlib import blake2b

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.block_pool import BlockHash


class BlockHasher:
    """Hashes of sequences' full blocks, each computed once.

    A hash covers the block's tokens and its predecessor's hash; the first predecessor is the cache salt, with the
    adapter's name and version if there is one. Without prefix caching each request has its own salt, so that it finds
    only its own blocks.
    """

    def __init__(self, *, block_size: int, is_shared: bool) -> None:
        """`is_shared`: requests can find each other's blocks."""
        self._block_size = block_size
        self._is_shared = is_shared

    def of(self, request: Request, count: int) -> list[BlockHash]:
        """Hashes of at least the request's first `count` blocks, whose tokens are known."""
        hashes, size = request.block_hashes, self._block_size
        while len(hashes) < count:
            start = len(hashes) * size
            # Digests have a fixed length and only the first one follows a salt, so two chains cannot collide.
            parent = hashes[-1] if hashes else self._salt(request)
            tokens = array("I", request.known_tokens(start, start + size)).tobytes()
            hashes.append(blake2b(parent + tokens, digest_size=16).digest())
        return hashes

    def _salt(self, request: Request) -> bytes:
        own = "" if self._is_shared else f"\0{request.request_id}/{request.index}/{request.attempt}"
        salt = f"{request.cache_salt}{own}".encode() + b"\0"
        if request.lora is None:
            return salt
        # UTF-8 has no 0xFF, so a client's salt never equals that of an adapter.
        return b"\xff" + blake2b(request.lora.digest_text, digest_size=16).digest() + salt
