"""The inputs of the chat template from a body, and the token ids of a body that is only tokenized."""

from collections.abc import Sequence
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.protocol import ChatBody, TokenizeBody
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving


def trusted_chat_template(chat_template: str | None, *, serving: Serving) -> str | None:
    """The chat template in the request.

    Raises:
        InvalidRequest: the server does not accept templates in requests.
    """
    if chat_template is not None and not serving.config.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template needs a server started with --trust-request-chat-template", field="chat_template"
        )
    return chat_template


def template_kwargs(body: ChatBody) -> dict[str, Any]:
    """Variables of the chat template, the reasoning effort included; effort none turns thinking off."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


async def token_ids_of(body: TokenizeBody, *, model: ServedModel, serving: Serving) -> list[int]:
    """Token ids of the text or the conversation in `body`.

    Raises:
        InvalidRequest: the body has neither or both, or the messages are wrong.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages must be given", field="prompt")
    if body.messages is None:
        add_special_tokens = body.add_special_tokens is not False
        return await model.prompts.from_text(
            body.prompt or "", add_special_tokens=add_special_tokens, field="prompt", is_counted=True
        )
    return await model.prompts.from_messages(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        chat_template=trusted_chat_template(body.chat_template, serving=serving),
        tools=body.tools,
        add_special_tokens=bool(body.add_special_tokens),
        is_counted=True,
    )


def token_strings(token_ids: Sequence[int], body: TokenizeBody, *, tokenizer: Tokenizer) -> list[str]:
    """The tokens of `body` as the vocabulary writes them ("Ġthe"); those of a conversation are plain text, so that
    together they show the rendered prompt, which no other call shows."""
    shown = tokenizer.token_piece if body.messages is None else tokenizer.token_text
    return [shown(token_id) for token_id in token_ids]
