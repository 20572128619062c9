"""A conversation at work: from its messages and tools to a run, and from the run's text to the assistant's message.

Chat completions, Responses, Messages and gRPC's Chat show the same conversation in different shapes. No HTTP in here.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.conversation.dialect import Dialect
from pagoda_frontend.conversation.message import CollectedMessage, MessageCollector, MessageDelta
from pagoda_frontend.conversation.message_reader import MessageReader, make_reader, plain_delta
from pagoda_frontend.conversation.template import template_kwargs, trusted_chat_template
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from pagoda_frontend.conversation.tool_constraint import constraint_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.logprobs import LogprobWriter, logprob_writer
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.choices import choices_of
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.requests.run import Run
from pagoda_frontend.requests.sampling import body_truncation, sampling_params_of
from pagoda_frontend.requests.serving import ServedModel, Serving
from pagoda_frontend.requests.start import make_run
from pagoda_frontend.requests.structured import constraint_field
from pagoda_frontend.requests.terms import Terms, terms_of


class Conversation:
    """The messages that one call generates. Made by `start_conversation`."""

    def __init__(
        self,
        *,
        serving: Serving,
        model: ServedModel,
        run: Run,
        prompt: list[int],
        logprobs: LogprobWriter | None,
        reader: MessageReader | None = None,
    ) -> None:
        """`reader`: None when all text is content."""
        self._serving = serving
        self.model = model
        self.run = run
        self.prompt = prompt
        """Token ids of the rendered conversation."""
        self.logprobs = logprobs
        """Writes the log probabilities; None when none were asked for."""
        self._reader = reader

    async def deltas(self) -> AsyncGenerator[list[MessageDelta]]:
        """What is new in the messages, as it comes. Closing it aborts what is unfinished.

        Raises:
            PagodaError: the request was refused or failed.
        """
        read = plain_delta if self._reader is None else self._reader.read
        async with aclosing(self.run.deltas()) as stream:
            async for deltas in stream:
                yield [read(delta) for delta in deltas]

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
        usage = self.run.usage()
        if self._reader is not None and self._serving.dialect.reasoning_parser is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reader.num_reasoning_tokens}
        return usage


async def start_conversation(
    body: ChatBody,
    *,
    serving: Serving,
    headers: Mapping[str, str],
    request_id: str,
    terms: Terms | None = None,
    beam_search: BeamSearchParams | None = None,
    note: bytes = b"",
    resumption: Resumption | None = None,
) -> Conversation:
    """Check `body`, render and tokenize its messages, and make the run; nothing is generated before it is read.

    Args:
        headers: of the call, with names in small letters.
        terms: tenant, priority and time limit, when they are not to be taken from headers and body.
        beam_search: when it is not to be taken from the body.
        note, resumption: as `Run` has them.

    Raises:
        InvalidRequest: `field` names the field.
        NotFound: there is none of that name.
        NotReady: the model is not known yet.
    """
    model = serving.model_named(body.model)
    dialect, tokenizer = serving.dialect, model.tokenizer
    plan = plan_tools(body, can_choose=dialect.can_choose)
    num_top = _num_top_logprobs(body, max_logprobs=serving.config.max_logprobs)
    if terms is None:
        terms = terms_of(headers, body, has_api_keys=bool(serving.config.api_key))
    choices = choices_of(body, best_of=None, with_logprobs=num_top is not None, beam_search=beam_search)
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
    text = await model.prompts.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_kwargs(body),
        chat_template=trusted_chat_template(body.chat_template, serving=serving),
        tools=plan.tools,
        documents=body.documents,
    )
    reasoning_end = dialect.reasoning_end(prompt=text, tokenizer=tokenizer)
    _constrain(params, plan=plan, dialect=dialect, reasoning_end=reasoning_end)
    params.structured_outputs = with_thinking_budget(
        params.structured_outputs,
        body.thinking_token_budget,
        dialect=dialect,
        prompt=text,
        tokenizer=tokenizer,
        max_model_len=model.max_model_len,
    )
    await model.grammars.check(params.structured_outputs, field=constraint_field(body))
    if dialect.needs_special_tokens(plan, tokenizer):
        params.skip_special_tokens = False
    prompt = await model.prompts.from_text(
        text,
        add_special_tokens=bool(body.add_special_tokens),
        field="messages",
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
        note=note,
        resumption=resumption,
    )
    return Conversation(
        serving=serving,
        model=model,
        run=run,
        prompt=prompt,
        logprobs=logprob_writer(body, tokenizer, num_top),
        reader=make_reader(
            dialect,
            plan,
            prompt=text,
            n=run.num_sequences,
            shows_reasoning=body.include_reasoning is not False,
            reasoning_end=reasoning_end,
            id_seed=run.engine_id,
        ),
    )


def _constrain(params: SamplingParams, *, plan: ToolPlan, dialect: Dialect, reasoning_end: tuple[int, ...]) -> None:
    """Hold the text to the calls that must be made, or to strict schemas, and any constraint to the answer alone."""
    constraint = params.structured_outputs
    if constraint is None or plan.choice != "auto":
        constraint = constraint_of(plan, dialect.tool_parser) or constraint
    if constraint is not None:
        params.structured_outputs = replace(constraint, start_after_token_ids=reasoning_end)


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
