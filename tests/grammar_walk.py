"""A walk along the tokens that a matcher allows, at random at first, then towards an end."""

from random import Random

import numpy as np
from llguidance import LLMatcher

from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.text.tokenizer import Tokenizer

CLOSERS = ('"', "}", "]", '"}', '"]', ":", "0", "1", "-", "a", "b", "x", "5", "2", "3", "4", ".", "@", *"comrgd")
"""What ends a document soon, the soonest first."""
MAX_TOKENS = 600


class DeadEnd(AssertionError):
    """Nothing may follow what was written so far."""


class Walker:
    """Walks under constraints of one compiler."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._words = [tokenizer.token_bytes(token_id) or b"" for token_id in range(tokenizer.vocab_size)]
        found = {word: token_id for token_id, word in enumerate(self._words)}
        self._closers = [found[text.encode()] for text in CLOSERS if text.encode() in found]

    def text(self, matcher: LLMatcher, draw: Random, *, num_free: int = 40, max_tokens: int = MAX_TOKENS) -> bytes:
        """A text that `matcher` accepts; after `num_free` tokens the walk makes for an end.

        Raises:
            DeadEnd: nothing may follow, or there is no end after `max_tokens` tokens.
        """
        written: list[int] = []
        while len(written) < max_tokens:
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if matcher.is_error() or not allowed.size:
                raise DeadEnd(f"{self._spelled(written)!r} {matcher.get_error()}")
            is_closing = len(written) >= num_free
            if allowed[-1] == self._compiler.end_id:
                if is_closing or allowed.size == 1 or draw.random() < 0.3:
                    return self._spelled(written)
                allowed = allowed[:-1]
            written.append(self._pick(allowed, draw, is_closing=is_closing))
            if not matcher.consume_token(written[-1]):
                raise DeadEnd(f"{self._spelled(written)!r} is not taken: {matcher.get_error()}")
        raise DeadEnd(f"{self._spelled(written)!r} does not end")

    def _pick(self, allowed: "np.ndarray[tuple[int], np.dtype[np.int64]]", draw: Random, *, is_closing: bool) -> int:
        if draw.random() < (0.95 if is_closing else 0.25):
            possible = set(allowed.tolist())
            closers = [token_id for token_id in self._closers if token_id in possible]
            if closers:
                return closers[0] if draw.random() < 0.6 else draw.choice(closers)
        return int(draw.choice(allowed.tolist()))

    def _spelled(self, token_ids: list[int]) -> bytes:
        return b"".join(self._words[token_id] for token_id in token_ids)
