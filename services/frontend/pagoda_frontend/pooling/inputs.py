"""Reads the inputs of pooling from a body with `input` or `messages`. Knows bodies; no engine."""

from typing import Any, cast

from pagoda_common.errors import InvalidRequest
from pagoda_common.text.pooling_prompts import Given
from pagoda_frontend.conversation.template import trusted_chat_template
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving


async def inputs_of(body: Any, model: ServedModel, *, serving: Serving) -> list[Given]:
    """Texts and token ids of /v1/embeddings, /pooling and /classify; a conversation is one list of token ids.

    Raises:
        InvalidRequest: the body has neither or both, the conversation cannot be rendered, or templates in requests are
        not allowed.
    """
    if body.messages is not None:
        if body.input is not None:
            raise InvalidRequest("there may be either input or messages, got both", field="messages")
        ids = await model.prompts.from_messages(
            body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            chat_template=trusted_chat_template(body.chat_template, serving=serving),
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
            is_counted=True,
        )
        return [ids]
    if body.input is None:
        raise InvalidRequest("input is missing: it must be a text, token ids or a list of these", field="input")
    if isinstance(body.input, str):
        return [body.input]
    if body.input and isinstance(body.input[0], int):
        return [body.input]
    return cast("list[Given]", list(body.input))
