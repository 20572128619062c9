"""The tokenizer of a checkpoint, read from its files with the tokenizers library. No torch, no transformers.

Importing transformers for it would cost seconds and pull in torch; all that is needed here are tokenizer.json,
tokenizer_config.json and the chat template.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Self

from tokenizers import Tokenizer as FastTokenizer

from pagoda_common.errors import InvalidRequest
from pagoda_common.text.chat_template import render_chat_template
from pagoda_common.text.detokenizer import IncrementalDetokenizer, make_detokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles, find_tokenizer_files
from pagoda_common.text.vocabulary import Vocabulary

LONG_TEXT_CHARS = 512
LONG_NUM_IDS = 256
"""From here on texts and ids are given to the tokenizers library as batches of one: only then does it let other threads
run meanwhile, and it takes half the time, for it notes no offsets."""


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, *, name: str, fast: FastTokenizer, files: TokenizerFiles) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.name = name
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self.special_tokens = files.special_tokens
        """Named special tokens as text: bos_token, eos_token, …"""
        self._fast = fast
        self._chat_templates = files.chat_templates
        self.prompt_files = files.prompt_files
        self._vocabulary = Vocabulary(fast)

    @classmethod
    def load(cls, name_or_path: str, *, revision: str | None = None) -> Self:
        """Read the tokenizer of a directory, a hub id or the embedded model.

        Raises:
            ModelLoadError: there is none, or it cannot be read.
        """
        directory = find_tokenizer_files(name_or_path, revision=revision)
        files = TokenizerFiles.read(directory)
        return cls(name=name_or_path, fast=files.load_fast_tokenizer(), files=files)

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self.special_tokens.get("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._special_token_id("eos_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence."""
        return self._special_token_id("bos_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are not text."""
        return self._vocabulary.special_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint brought a chat template."""
        return bool(self._chat_templates)

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the checkpoint's default chat template."""
        return self._chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Holds the calling thread, and the interpreter while it is short."""
        if len(text) >= LONG_TEXT_CHARS:
            return self.encode_batch((text,), add_special_tokens=add_special_tokens)[0]
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_within(
        self,
        text: str,
        *,
        pair: str | None = None,
        max_tokens: int | None = None,
        side: Literal["left", "right"] = "right",
        add_special_tokens: bool = True,
    ) -> tuple[list[int], int]:
        """Token ids of a text or of two as one sequence, and the first token of the second kind; 0: there is none.

        Args:
            max_tokens: keep no more, special tokens included; of two texts the longer one is cut first. None keeps all.
            side: where a text is cut.
        """
        first = self._fast.encode(text, add_special_tokens=False)
        second = None if pair is None else self._fast.encode(pair, add_special_tokens=False)
        if max_tokens is not None:
            num_special = self._fast.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
            room = max(0, max_tokens - num_special)
            sizes = _longest_first(len(first), 0 if second is None else len(second), room)
            first.truncate(sizes[0], direction=side)
            if second is not None:
                second.truncate(sizes[1], direction=side)
        whole = self._fast.post_process(first, second, add_special_tokens)
        kinds: list[int] = whole.type_ids
        return list(whole.ids), kinds.index(1) if 1 in kinds else 0

    def cut(self, text: str, max_tokens: int) -> str:
        """The part of a text that the first `max_tokens` tokens cover."""
        whole = self._fast.encode(text, add_special_tokens=False)
        if len(whole) <= max_tokens:
            return text
        end: int = whole.offsets[max_tokens - 1][1]
        return text[:end]

    def encode_pieces(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of a text in pieces of at most `max_tokens`, each with special tokens of its own.

        Raises:
            ValueError: special tokens leave no room.
        """
        whole = self._fast.encode(text, add_special_tokens=False)
        room = max_tokens - (self._fast.num_special_tokens_to_add(False) if add_special_tokens else 0)
        if room < 1:
            raise ValueError(f"max_tokens is {max_tokens}, too few for the special tokens alone")
        whole.truncate(room)
        made = self._fast.post_process(whole, None, add_special_tokens)
        return [list(one.ids) for one in (made, *made.overflowing)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all of `token_ids`."""
        ids = list(token_ids)
        if len(ids) >= LONG_NUM_IDS:
            texts: list[str] = self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return texts[0]
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """Text of a sequence that continues `prompt_token_ids`, piece by piece."""
        return make_detokenizer(self._fast, self._vocabulary, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token; of the vocabulary's thousands, so it takes a while."""
        return max((len(self._vocabulary.token_bytes(token_id)) for token_id in range(self.vocab_size)), default=1)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; special tokens by their name, incomplete characters as U+FFFD."""
        return self._vocabulary.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_piece(self, token_id: int) -> str:
        """One token as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>"); empty for an unknown id."""
        return self._fast.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that one token adds to a text; None for an unknown id."""
        return self._vocabulary.token_bytes(token_id) or None

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        token_id: int | None = self._fast.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary; None for an unknown id."""
        token: str | None = self._fast.id_to_token(token_id)
        return token

    def get_vocab(self) -> dict[str, int]:
        """Ids by the spelling of their tokens, added ones included."""
        vocabulary: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return vocabulary

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with add_special_tokens=False: templates write their own.

        Args:
            messages: role and content, as in OpenAI's chat API.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end where the content of the last message ends.
            chat_template: Jinja text, or the name of one of the checkpoint's templates; None takes the checkpoint's.
            tools: JSON schemas of functions.
            kwargs: further variables of the template.

        Raises:
            InvalidRequest: no template, or it refuses the messages.
        """
        variables = {**self.special_tokens, "tools": tools, "documents": None, **kwargs}
        return render_chat_template(
            self.choose_template(chat_template, has_tools=bool(tools)),
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def choose_template(self, chat_template: str | None, *, has_tools: bool) -> str:
        """Jinja text of the template for a conversation; `chat_template` as in apply_chat_template.

        Raises:
            InvalidRequest: there is none.
        """
        if chat_template is not None:
            return self._chat_templates.get(chat_template, chat_template)
        name = "tool_use" if has_tools and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise InvalidRequest(
                f"the tokenizer of {self.name} has no chat template, so it cannot take messages", field="messages"
            )
        return self._chat_templates[name]

    def _special_token_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept, as the tokenizers library's strategy of the same name."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)
