"""Makes prompt token ids from texts, token ids, and conversations (by the chat template)."""

from collections.abc import Sequence
from typing import Any

import jinja2
import orjson

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text import exact_json
from pagoda_common.text.chat_template import has_role, render_chat_template
from pagoda_common.text.pooling_prompts import score_template
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.budget.work_pool import WorkPool
from pagoda_frontend.openai.protocol import ChatMessage, ContentPart, MessageToolCall, Tool
from pagoda_frontend.requests.encoding import TextEncoder
from pagoda_frontend.requests.params import check_token_ids, too_long
from pagoda_frontend.requests.template_helpers import TemplateHelpers

NOT_IN_KWARGS = ("messages", "chat_template", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Template variables that have their own request field."""
PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field that holds the text of a content part, by type."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that are valid in any conversation."""
OWN_FIELDS = ("role", "content", "tool_calls", "reasoning", "reasoning_content", "function_call")
"""Fields of a message that chat templates get in another shape, or not at all."""


class Prompts:
    """Makes prompts for one model."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        chat_template: str | None,
        max_model_len: int,
        vocab_size: int,
        work: WorkPool | None = None,
        longest_token_chars: int = 0,
    ) -> None:
        """`longest_token_chars`: as in TextEncoder."""
        self._work = WorkPool() if work is None else work
        self._encoder = TextEncoder(
            tokenizer=tokenizer,
            work=self._work,
            max_model_len=max_model_len,
            longest_token_chars=longest_token_chars,
        )
        self._helpers = TemplateHelpers(work=self._work)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    async def close(self) -> None:
        """End the processes that render templates of requests."""
        await self._helpers.close()

    async def from_text(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        field: str,
        truncation: Truncation | None = None,
        is_counted: bool = False,
    ) -> list[int]:
        """Token ids of `text`; arguments and errors as in `TextEncoder.encode`."""
        return await self._encoder.encode(
            text,
            add_special_tokens=add_special_tokens,
            field=field,
            truncation=truncation,
            is_counted=is_counted,
        )

    def from_token_ids(
        self, token_ids: Sequence[int], *, field: str, truncation: Truncation | None = None
    ) -> list[int]:
        """`token_ids`, or those that `truncation` keeps, checked against the vocabulary.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
            RequestTooLong: there are more than the context holds.
        """
        if truncation is not None:
            token_ids = truncation.apply(list(token_ids))
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
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        is_counted: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, or those that `truncation` keeps; `is_counted` as in `TextEncoder.encode`.

        Raises:
            InvalidRequest: the messages or the template do not allow it.
            RequestTooLong: the conversation is certainly longer than the context.
        """
        text = await self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
        )
        return await self.from_text(
            text,
            add_special_tokens=add_special_tokens,
            field="messages",
            truncation=truncation,
            is_counted=is_counted,
        )

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation rendered by the chat template; arguments and errors as in `from_messages`."""
        if not messages:
            raise InvalidRequest("messages is empty: there must be at least one message", field="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                field="continue_final_message",
            )
        kwargs = chat_template_kwargs or {}
        for name in NOT_IN_KWARGS:
            if name in kwargs:
                raise InvalidRequest(f"chat_template_kwargs must not contain {name}", field="chat_template_kwargs")
        template = self.template(chat_template, tools=tools)

        def arguments() -> dict[str, Any]:
            self._check_roles(messages, template)
            variables = {
                **self._tokenizer.special_tokens,
                "tools": [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **kwargs,
            }
            return {
                "source": template,
                "messages": [template_message(message, number) for number, message in enumerate(messages)],
                "continue_final_message": continue_final_message,
                "variables": variables,
            }

        def apply() -> str:
            given = arguments()
            variables = given.pop("variables")
            return render_chat_template(**given, **variables)

        try:
            if chat_template is not None and template == chat_template:  # not a name of the checkpoint's
                return await self._helpers.render(await self._work.prepare(arguments))
            return await self._work.prepare(apply)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"the chat template refused the messages: {error}", field="messages") from error

    def template(self, chat_template: str | None, *, tools: Sequence[Tool] | None) -> str:
        """Jinja text for a conversation: the request's, else the server's, else the checkpoint's.

        Raises:
            InvalidRequest: there is none.
        """
        return self._tokenizer.choose_template(chat_template or self._chat_template, has_tools=bool(tools))

    @property
    def score_template(self) -> str | None:
        """Jinja text that renders a query and a document as one text; None if there is none."""
        return score_template(self._chat_template or self._tokenizer.chat_template)

    def check_length(self, num_chars: int, *, field: str, is_cut: bool) -> None:
        """Raises RequestTooLong when a text of `num_chars` characters cannot fit, whatever its content.

        Args:
            is_cut: the text will be truncated, so it may be as long as a text whose tokens are counted.
        """
        if is_cut:
            self._encoder.check_counted(num_chars, field)
        else:
            self._encoder.check_length(num_chars, field=field)

    def _check_roles(self, messages: Sequence[ChatMessage], template: str) -> None:
        for number, message in enumerate(messages):
            if message.role not in ROLES and not (message.role and has_role(template, message.role)):
                raise InvalidRequest(
                    f"messages.{number}.role is {message.role[:100]!r}, must be one of {', '.join(ROLES)}, or one that "
                    "the chat template writes",
                    field="messages",
                )


def template_message(message: ChatMessage, number: int) -> dict[str, Any]:
    """`message` as chat templates expect it: parts joined to one text, arguments of calls as objects.

    Raises:
        InvalidRequest: the content is missing, or is not text.
    """
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"messages.{number}.content: a {message.role} message needs content", field="messages")
    if isinstance(content, list):
        content = "\n".join(
            _part_text(part, f"messages.{number}.content.{place}") for place, part in enumerate(content)
        )
    extra = {**(message.model_extra or {}), "tool_call_id": message.tool_call_id}
    shown = {name: value for name, value in extra.items() if value is not None and name not in OWN_FIELDS}
    shown |= {"role": message.role, "content": content or ""}
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    reasoning = message.reasoning or extra.get("reasoning_content")
    if isinstance(reasoning, str):
        shown["reasoning"] = shown["reasoning_content"] = reasoning  # templates know either name
    return shown


def _part_text(part: str | ContentPart, name: str) -> str:
    if isinstance(part, str):
        return part
    field = PART_FIELDS.get(part.type)
    if field is None:
        raise InvalidRequest(f"{name}: parts of type {part.type!r} are not supported yet", field="messages")
    text: str | None = getattr(part, field)
    if text is None:
        raise InvalidRequest(f"{name}.{field}: field required", field="messages")
    return text


def _template_call(call: MessageToolCall) -> dict[str, Any]:
    """`call` with its arguments as an object, which templates write in the model's format; as text if they are not an
    object."""
    arguments: Any = call.function.arguments
    if not arguments:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = exact_json.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = call.function.arguments
    shown: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return {"id": call.id, **shown} if call.id is not None else shown
