"""Tokenizes texts on threads, no more of each than its use may need. Knows no conversation."""

from functools import partial

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.requests.params import too_long

LONG_TEXT_CHARS = 64 * 1024
"""Characters up to which a text is always tokenized whole."""
LEAST_TOKEN_CHARS = 128
"""Characters per token that are assumed at least, even where the vocabulary has no such long token."""
USUAL_TOKEN_CHARS = 8
"""Characters per token above that of usual texts: a text longer than this times the context is first tried in pieces.
"""
NUM_CUT_TOKENS = 64
"""Number of tokens that cutting a text may add or remove."""
MAX_COUNTED_CHARS = 1024**2
"""Maximum characters of a text whose tokens are only counted or shown, which may exceed the context."""


class TextEncoder:
    """Tokenizes for one model. The cost is bounded by the context, not by the text."""

    def __init__(
        self, *, tokenizer: Tokenizer, work: WorkPool, max_model_len: int, longest_token_chars: int = 0
    ) -> None:
        """`longest_token_chars`: characters of the vocabulary's longest token, or less where it is not known."""
        self._tokenizer = tokenizer
        self._work = work
        self._max_model_len = max_model_len
        self._token_chars = max(LEAST_TOKEN_CHARS, longest_token_chars)

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        field: str,
        truncation: Truncation | None = None,
        is_counted: bool = False,
    ) -> list[int]:
        """Token ids of `text`, or those that `truncation` keeps.

        Args:
            field: the request's field that holds the text.
            is_counted: the ids are not for the model, so there may be more than the context holds.

        Raises:
            RequestTooLong: the text is certainly longer than the context.
            InvalidRequest: the text is too long to be counted.
            QueueFull: too many texts wait to be tokenized.
        """
        if is_counted:
            self.check_counted(len(text), field)
        elif truncation is not None:
            return await self._work.run(
                lambda: self._truncated(text, truncation, add_special_tokens), num_bytes=len(text)
            )
        else:
            self.check_length(len(text), field=field)
            if len(text) > max(LONG_TEXT_CHARS, USUAL_TOKEN_CHARS * self._max_model_len):
                await self._try_pieces(text, field)
        return await self._work.run(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens), num_bytes=len(text)
        )

    def check_length(self, num_chars: int, *, field: str) -> None:
        """Raises RequestTooLong when a text of `num_chars` characters cannot fit, whatever its content."""
        least = num_chars // self._token_chars
        if num_chars > LONG_TEXT_CHARS and least >= self._max_model_len:
            raise RequestTooLong(too_long(f"at least {least}", self._max_model_len), field=field)

    def check_counted(self, num_chars: int, field: str) -> None:
        """Raises InvalidRequest when a text of `num_chars` characters is too long to be tokenized whole."""
        bound = max(MAX_COUNTED_CHARS, USUAL_TOKEN_CHARS * self._max_model_len)
        if num_chars > bound:
            raise InvalidRequest(f"{field} must have at most {bound} characters, got {num_chars}", field=field)

    async def _try_pieces(self, text: str, field: str) -> None:
        """Raises RequestTooLong once pieces of the text have more tokens than the context."""
        size = max(LONG_TEXT_CHARS, USUAL_TOKEN_CHARS * self._max_model_len // 2)
        num_tokens = 0
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            ids = await self._work.run(
                partial(self._tokenizer.encode, piece, add_special_tokens=False), num_bytes=len(piece)
            )
            num_tokens += len(ids) - NUM_CUT_TOKENS
            if num_tokens >= self._max_model_len:
                raise RequestTooLong(too_long(f"at least {num_tokens}", self._max_model_len), field=field)

    def _truncated(self, text: str, truncation: Truncation, add_special_tokens: bool) -> list[int]:
        """Tokenize only the end (or beginning) of a long text, with a margin, and more if that was too short."""
        size = max(LONG_TEXT_CHARS, 2 * USUAL_TOKEN_CHARS * truncation.num_tokens)
        while 2 * size < len(text):
            part = text[-size:] if truncation.side == "left" else text[:size]
            ids = self._tokenizer.encode(part, add_special_tokens=add_special_tokens)
            if len(ids) >= truncation.num_tokens + NUM_CUT_TOKENS:
                return truncation.apply(ids)
            size *= 4
        return truncation.apply(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
