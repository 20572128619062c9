"""From what clients write to prompt token ids: texts, token ids, conversations through the chat template."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from pagoda_common.errors import ConfigError, InvalidRequest, RequestTooLong
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.params import check_token_ids, too_long
from pagoda_frontend.protocol import ChatMessage

LONG_TEXT_CHARS = 64 * 1024
"""Templates are rendered on a thread from here on, and texts that cannot fit are refused untokenized."""
MAX_TOKEN_CHARS = 128
"""No token stands for more characters than this (longer runs of spaces apart)."""


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, *, tokenizer: Tokenizer, chat_template: str | None, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    async def from_text(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """Token ids of `text`.

        Raises:
            RequestTooLong: the text is certainly longer than the context.
        """
        least = len(text) // MAX_TOKEN_CHARS
        if len(text) > LONG_TEXT_CHARS and least >= self._max_model_len:
            raise RequestTooLong(too_long(f"at least {least}", self._max_model_len), field=field)
        return await self._tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    def from_token_ids(self, token_ids: Sequence[int], *, field: str) -> list[int]:
        """`token_ids`, checked against the vocabulary.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
            RequestTooLong: there are more than the context holds.
        """
        if len(token_ids) >= self._max_model_len:
            raise RequestTooLong(too_long(str(len(token_ids)), self._max_model_len), field=field)
        check_token_ids(token_ids, vocab_size=self._vocab_size, field=field)
        return list(token_ids)

    async def from_messages(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            InvalidRequest: the messages or the template do not allow it.
            RequestTooLong: the conversation is certainly longer than the context.
        """
        text = await self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self.from_text(text, add_special_tokens=add_special_tokens, field="messages")

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it; arguments and errors as `from_messages`."""
        if not messages:
            raise InvalidRequest("messages is empty: there must be at least one message", field="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=false", field="continue_final_message"
            )
        kwargs = chat_template_kwargs or {}
        for name in ("messages", "chat_template", "tools", "add_generation_prompt", "continue_final_message"):
            if name in kwargs:
                raise InvalidRequest(f"chat_template_kwargs must not contain {name}", field="chat_template_kwargs")
        conversation = [template_message(message, number) for number, message in enumerate(messages)]

        def apply() -> str:
            return self._tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=self._chat_template,
                **kwargs,
            )

        size = sum(len(message["content"] or "") for message in conversation)
        try:
            text = await asyncio.to_thread(apply) if size > LONG_TEXT_CHARS else apply()
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="messages") from error
        return _cut_after(text, conversation[-1]["content"] or "") if continue_final_message else text


def template_message(message: ChatMessage, number: int) -> dict[str, Any]:
    """`message` as chat templates expect it, with its parts joined to one text.

    Raises:
        InvalidRequest: the content is missing, or is not text.
    """
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"messages.{number}.content: a {message.role} message needs content", field="messages")
    if isinstance(content, list):
        for place, part in enumerate(content):
            name = f"messages.{number}.content.{place}"
            if part.type != "text":
                raise InvalidRequest(f"{name}: parts of type {part.type!r} are not supported yet", field="messages")
            if part.text is None:
                raise InvalidRequest(f"{name}.text: field required", field="messages")
        content = "\n".join(part.text or "" for part in content)
    extra = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    return {**extra, "role": message.role, "content": content}


def _cut_after(text: str, final: str) -> str:
    """`text` up to the end of the final message, so that the model goes on writing it."""
    place = text.rfind(final.strip())
    if not final.strip() or place < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the final message as it is", field="messages"
        )
    whole = final.lstrip()
    return text[: place + (len(whole) if text.startswith(whole, place) else len(final.strip()))]


def load_chat_template(value: str | None) -> str | None:
    """The template that a flag names: a file, or the text itself.

    Raises:
        ConfigError: the file cannot be read.
    """
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {value!r} cannot be read: {error}", field="chat_template") from error
