"""Incremental detokenizer: token ids to text as they arrive, complete characters only, each token processed once.

The deltas of one sequence, joined, are what the tokenizer decodes from all ids at once. Knows no requests, no gRPC.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from pagoda_common.text.vocabulary import Spelling, Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NUM_CONTEXT_TOKENS = 8
"""Prompt tokens that may still shape the first output: a character has at most 4 bytes."""
MAX_HELD_TOKENS = 16
"""A window that has not become a character by then never will."""


class IncrementalDetokenizer(ABC):
    """The text of one sequence. Special tokens are left out if asked for."""

    @abstractmethod
    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that has become complete, which may be empty."""

    @abstractmethod
    def flush(self) -> str:
        """The sequence has ended: returns what was held back, incomplete characters as U+FFFD."""


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """For byte-level BPE (GPT-2, Llama 3, Qwen, …): tokens are bytes, and UTF-8 says where a character ends."""

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skipped: frozenset[int] = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._held = b""
        """The beginning of a character."""
        self.append(prompt_token_ids[-NUM_CONTEXT_TOKENS:])  # the prompt may end within a character

    def append(self, token_ids: Sequence[int]) -> str:
        skipped, token_bytes = self._skipped, self._token_bytes
        if len(token_ids) == 1:
            return "" if token_ids[0] in skipped else self._decode(token_bytes(token_ids[0]))
        return self._decode(b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped]))

    def flush(self) -> str:
        return self._decode(b"", is_last=True)

    def _decode(self, more: bytes, *, is_last: bool = False) -> str:
        """As codecs' incremental decoder, whose layers cost more than the decoding of a token."""
        data = self._held + more
        text, num_decoded = codecs.utf_8_decode(data, "replace", is_last)
        self._held = data[num_decoded:]
        return text


class ByteFallbackDetokenizer(IncrementalDetokenizer):
    """For SentencePiece with byte fallback (Llama 2, Mistral, Phi-3, Gemma): text tokens, and runs of byte tokens.

    A run's characters come out as they complete. In a run that is not UTF-8 every byte is U+FFFD, as the tokenizers
    library has it, with one difference: characters that came out before the first bad byte of the run stay.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped: frozenset[int] = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._run = bytearray()
        self._is_run_bad = False
        self._is_at_start = False
        for token_id in prompt_token_ids[-NUM_CONTEXT_TOKENS:]:
            self._append(token_id)
        # The tokenizer drops the first space of a text; a continuation of a prompt with text keeps it.
        self._is_at_start = vocabulary.is_first_space_stripped and all(
            token_id in self._skipped for token_id in prompt_token_ids
        )

    def append(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._append(token_ids[0])
        return "".join([self._append(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._end_run()

    def _append(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._vocabulary.token_bytes(token_id)
        if len(piece) == 1 and (byte := self._vocabulary.byte_of(token_id)) is not None:
            text = self._append_byte(byte)
        else:
            text = self._end_run() + piece.decode()
        if self._is_at_start and text:
            self._is_at_start = False
            return text.removeprefix(" ")
        return text

    def _append_byte(self, byte: int) -> str:
        if self._is_run_bad:
            return REPLACEMENT
        self._run.append(byte)
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._is_run_bad = True
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _end_run(self) -> str:
        self._is_run_bad = False
        if not self._run:
            return ""
        text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text


class WindowDetokenizer(IncrementalDetokenizer):
    """For every other decoder: decode a few tokens with and without the new ones; what differs is new.

    Source: prefix and read offsets as in Hugging Face text-generation-inference.
    """

    def __init__(
        self, fast: FastTokenizer, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._fast = fast
        self._skipped: frozenset[int] = vocabulary.special_ids if skip_special_tokens else frozenset()
        context = [token_id for token_id in prompt_token_ids if token_id not in self._skipped][-NUM_CONTEXT_TOKENS:]
        self._window = context
        self._num_read = len(context)
        """Tokens of the window whose text is out."""

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        return self._take(self._difference())

    def _append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._difference()
        is_held = text.endswith(REPLACEMENT) and len(self._window) - self._num_read < MAX_HELD_TOKENS
        return "" if is_held or not text else self._take(text)

    def _difference(self) -> str:
        before: str = self._fast.decode(self._window[: self._num_read], skip_special_tokens=False)
        after: str = self._fast.decode(self._window, skip_special_tokens=False)
        return after[len(before) :]

    def _take(self, text: str) -> str:
        del self._window[: max(0, self._num_read - NUM_CONTEXT_TOKENS)]
        self._num_read = len(self._window)
        return text


def make_detokenizer(
    fast: FastTokenizer, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> IncrementalDetokenizer:
    """The detokenizer for the tokenizer's decoder, for a text that continues `prompt_token_ids`."""
    match vocabulary.spelling:
        case Spelling.BYTE_LEVEL:
            return ByteLevelDetokenizer(vocabulary, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        case Spelling.BYTE_FALLBACK:
            return ByteFallbackDetokenizer(vocabulary, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        case Spelling.OTHER:
            return WindowDetokenizer(fast, vocabulary, prompt_token_ids, skip_special_tokens=skip_special_tokens)
