"""Ids of what a response is made of. A frontend that resumes a stream must give the same ones: they are drawn from
what the request is called in the engine, which outlives its frontend."""

import uuid
from hashlib import sha256


def drawn_id(seed: str, what: str) -> str:
    """64 hexadecimal digits for `what`, the same for the same `seed`; without one 32 random digits."""
    return sha256(f"{seed}/{what}".encode()).hexdigest() if seed else uuid.uuid4().hex
