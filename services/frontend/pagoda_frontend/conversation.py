"""A conversation at work: from its messages and tools to a run, and from the run's text to the assistant's message.

Chat completions, Responses, Messages and gRPC's Chat show the same conversation in different shapes. No HTTP in here.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.outputs import SequenceDelta
from pagoda_frontend.calls import body_truncation, logprob_writer, make_run, sampling_params_of, usage_of
from pagoda_frontend.choices import choices_of
from pagoda_frontend.logprobs import LogprobWriter
from pagoda_frontend.message import CollectedMessage, MessageCollector, MessageDelta
from pagoda_frontend.protocol import ChatBody
from pagoda_frontend.run import Run
from pagoda_frontend.serving import ServedModel, Serving
from pagoda_frontend.terms import Terms, terms_of


class Conversation:
    """The messages that one call generates. Made by `start_conversation`."""

    def __init__(
        self, *, serving: Serving, model: ServedModel, run: Run, prompt: list[int], logprobs: LogprobWriter | None
    ) -> None:
        self._serving = serving
        self.model = model
        self.run = run
        self.prompt = prompt
        """Token ids of the rendered conversation."""
        self.logprobs = logprobs
        """Writes the log probabilities; None when none were asked for."""

    async def deltas(self) -> AsyncGenerator[list[MessageDelta]]:
        """What is new in the messages, as it comes. Closing it aborts what is unfinished.

        Raises:
            PagodaError: the request was refused or failed.
        """
        async with aclosing(self.run.deltas()) as stream:
            async for deltas in stream:
                yield [_plain(delta) for delta in deltas]

    async def collect(self) -> list[CollectedMessage]:
        """Every message, whole, in order of index; raises as `deltas`."""
        collectors = [MessageCollector(index) for index in range(self.run.num_sequences)]
        async with aclosing(self.deltas()) as stream:
            async for deltas in stream:
                for delta in deltas:
                    collectors[delta.index].add(delta)
        return [collector.finish() for collector in collectors]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as of now."""
        return usage_of(self.run, self._serving)


async def start_conversation(
    body: ChatBody,
    *,
    serving: Serving,
    headers: Mapping[str, str],
    request_id: str,
    terms: Terms | None = None,
) -> Conversation:
    """Check `body`, render and tokenize its messages, and make the run; nothing is generated before it is read.

    Args:
        headers: of the call, with names in small letters.
        terms: tenant, priority and time limit, when they are not to be taken from headers and body.

    Raises:
        InvalidRequest: `field` names the field.
        UnknownModel: there is none of that name.
        NotReady: the model is not known yet.
    """
    model = serving.model_named(body.model)
    _check_response_format(body.response_format)
    num_top = _num_top_logprobs(body, max_logprobs=serving.config.max_logprobs)
    if terms is None:
        terms = terms_of(headers, body, has_api_keys=bool(serving.config.api_key))
    choices = choices_of(body, best_of=None, with_logprobs=num_top is not None)
    max_tokens = body.max_completion_tokens
    try:
        params = sampling_params_of(
            body,
            serving=serving,
            model=model,
            choices=choices,
            logprobs=num_top,
            max_tokens=max_tokens if max_tokens is not None else body.max_tokens,
        )
    except InvalidRequest as error:
        raise _renamed(error, body) from error
    prompt = await model.prompts.from_messages(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        truncation=body_truncation(body, params=params, model=model),
    )
    run = make_run(
        body,
        serving=serving,
        model=model,
        request_id=request_id,
        prompts=[prompt],
        params=params,
        choices=choices,
        terms=terms,
        field="messages",
    )
    logprobs = logprob_writer(body, model, num_top)
    return Conversation(serving=serving, model=model, run=run, prompt=prompt, logprobs=logprobs)


def _plain(delta: SequenceDelta) -> MessageDelta:
    return MessageDelta(
        delta.index,
        "",
        delta.text,
        [],
        delta,
        delta.finish_reason,
        delta.stop_reason,
        delta.token_ids,
        delta.logprobs,
    )


def _check_response_format(response_format: dict[str, Any] | None) -> None:
    kind = "text" if response_format is None else response_format.get("type")
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise InvalidRequest(f"response_format of type {kind} is not supported yet", field="response_format")
    if kind != "text":
        raise InvalidRequest(f"response_format.type must be text, got {kind!r}", field="response_format")


def _num_top_logprobs(body: ChatBody, *, max_logprobs: int) -> int | None:
    """Top log probabilities per token; None when no log probabilities are asked for."""
    top = body.top_logprobs
    if top is not None:
        if top < -1:
            raise InvalidRequest(f"top_logprobs must be at least 0, got {top}", field="top_logprobs")
        if max_logprobs != -1 and (top > max_logprobs or top == -1):
            raise InvalidRequest(f"top_logprobs must be at most {max_logprobs}, got {top}", field="top_logprobs")
        if top and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", field="top_logprobs")
    return (top or 0) if body.logprobs else None


def _renamed(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    """`error` with the name under which the client gave the bound."""
    if error.field == "max_tokens" and body.max_completion_tokens is not None:
        message = error.message.replace("max_tokens", "max_completion_tokens")
        return InvalidRequest(message, field="max_completion_tokens")
    return error
