"""Ids of the parts of a response. They are derived from the request's id in the engine, which outlives a frontend, so
that a frontend that resumes a stream gives the same ids."""

import uuid
from hashlib import sha256


def drawn_id(seed: str, what: str) -> str:
    """64 hexadecimal digits for `what`, the same for the same `seed`; 32 random digits without a seed."""
    return sha256(f"{seed}/{what}".encode()).hexdigest() if seed else uuid.uuid4().hex
