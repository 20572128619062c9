"""The result of LLM.get_tokenizer: a checkpoint's tokenizer with transformers' names and defaults.

transformers itself would bring torch into the caller's process. Lists stay lists: there is no return_tensors.
"""

from collections.abc import Sequence
from typing import Any

from pagoda.llm.conversation import Message, render
from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """input_ids and attention_mask, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HubTokenizer:
    """Reads and writes token ids of one checkpoint."""

    is_fast = True
    truncation_side = "right"
    """Where `truncation` cuts."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        """Pagoda's own, which does the work."""
        self.name_or_path = backend.name
        self.vocab_size = backend.vocab_size
        """Tokens, added ones included."""
        self.eos_token = backend.special_tokens.get("eos_token")
        self.bos_token = backend.special_tokens.get("bos_token")
        self.pad_token = backend.special_tokens.get("pad_token")
        self.unk_token = backend.special_tokens.get("unk_token")
        self.eos_token_id = backend.eos_token_id
        self.bos_token_id = backend.bos_token_id
        self.pad_token_id = None if self.pad_token is None else backend.token_id(self.pad_token)
        self.unk_token_id = None if self.unk_token is None else backend.token_id(self.unk_token)
        self.all_special_ids = sorted(backend.special_token_ids)
        self.all_special_tokens = [backend.token(token_id) for token_id in self.all_special_ids]

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **options: Any,
    ) -> Encoding:
        """Token ids of a text, or of each text.

        Raises:
            InvalidRequest: an unsupported option, such as padding, asks for something.
        """
        for name, value in options.items():
            if value and name not in ("return_attention_mask",):
                raise InvalidRequest(
                    f"{name} is not supported: token ids come as lists of their own length", field=name
                )
        texts = [text] if isinstance(text, str) else list(text)
        rows = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        rows = [row[:max_length] for row in rows] if truncation and max_length is not None else rows
        masks = [[1] * len(row) for row in rows]
        if isinstance(text, str):
            return Encoding(input_ids=rows[0], attention_mask=masks[0])
        return Encoding(input_ids=rows, attention_mask=masks)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def tokenize(self, text: str) -> list[str | None]:
        """Tokens of one text, as the vocabulary spells them."""
        return [self.backend.token(token_id) for token_id in self.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of one token, or of several."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Text of each row."""
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each; unknown ones have the unknown token's, or None."""

        def one(token: str) -> int | None:
            token_id = self.backend.token_id(token)
            return self.unk_token_id if token_id is None else token_id

        return one(tokens) if isinstance(tokens, str) else [one(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each, as the vocabulary spells it; None for an unknown id."""
        return self.backend.token(ids) if isinstance(ids, int) else [self.backend.token(int(one)) for one in ids]

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
        return self.backend.get_vocab()

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """A conversation, or each of several, as the chat template writes it.

        Returns:
            Text without `tokenize`; else an Encoding, or without `return_dict` its input_ids.

        Raises:
            InvalidRequest: no template, or it refuses the messages.
        """
        texts = render(
            conversation,
            self.backend,
            chat_template=chat_template,
            content_format="auto",
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )
        is_one = bool(conversation) and not isinstance(conversation[0], Sequence)
        if not tokenize:
            return texts[0] if is_one else texts
        encoding = self(texts[0] if is_one else texts, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids
