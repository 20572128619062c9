"""Echoes the prompt at the beginning of a completion, with its log probabilities when they are requested."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.logprobs import LogprobWriter


class Echo:
    """One prompt to echo."""

    def __init__(
        self,
        *,
        text: str | None,
        token_ids: list[int],
        tokenizer: Tokenizer,
        logprobs: LogprobWriter | None,
    ) -> None:
        """
        Args:
            text: the prompt as given; None where token ids were given, whose special tokens are shown too.
        """
        self._skips = text is not None
        self.text = tokenizer.decode(token_ids, skip_special_tokens=False) if text is None else text
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def put_before(self, choice: dict[str, Any], positions: Sequence[TokenLogprobs | None] | None) -> None:
        """Put the prompt at the beginning of a completion's choice.

        Args:
            choice: its text and logprobs are changed in place.
            positions: log probabilities of the prompt's tokens, if they are requested.
        """
        choice["text"] = self.text + choice["text"]
        if self._logprobs is None or positions is None:
            return
        lists = self._logprobs.for_prompt(self._token_ids, positions, self._text_offsets)
        generated = choice["logprobs"]
        if generated is not None:
            lists["text_offset"] += [len(self.text) + offset for offset in generated["text_offset"]]
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                lists[name] = lists[name] + generated[name]
        choice["logprobs"] = lists

    @cached_property
    def _text_offsets(self) -> list[int]:
        """Characters of the text before each token; special tokens, which are not in it, take none."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._skips)
        offsets, place = [], 0
        for token_id in self._token_ids:
            offsets.append(min(place, len(self.text)))
            place += len(detokenizer.append([token_id]))
        return offsets
