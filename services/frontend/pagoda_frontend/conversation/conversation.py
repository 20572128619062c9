"""Conversation: turns messages and tools into a run, and the run's text into the assistant's message.

Chat completions, Responses, Messages and gRPC's Chat show the same conversation in different shapes. Knows no HTTP.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pagoda_common.params.beam_search import BeamSearchParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.conversation.call_ids import with_readable_ids
from pagoda_frontend.conversation.message import CollectedMessage, MessageCollector, MessageDelta
from pagoda_frontend.conversation.message_reader import MessageReader
from pagoda_frontend.conversation.template import template_kwargs, trusted_chat_template
from pagoda_frontend.conversation.thinking_budget import with_thinking_budget
from pagoda_frontend.conversation.tool_constraint import constraint_of
from pagoda_frontend.conversation.tools import ToolPlan, plan_tools
from pagoda_frontend.openai.logprobs import LogprobWriter, logprob_writer, num_top_logprobs
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.call_context import CallContext
from pagoda_frontend.requests.choices import Choices, choices_of
from pagoda_frontend.requests.errors import fields_named
from pagoda_frontend.requests.run import Run, hold_kept, start_run
from pagoda_frontend.requests.sampling import body_truncation, sampling_params_of
from pagoda_frontend.requests.structured import constraint_field
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving


class Conversation:
    """The messages that one call generates. Made by `start_conversation`."""

    def __init__(self, *, run: Run, prompt: list[int], logprobs: LogprobWriter | None, reader: MessageReader) -> None:
        self.run = run
        self.prompt = prompt
        """Token ids of the rendered conversation."""
        self.logprobs = logprobs
        """Writes the log probabilities; None when none are requested."""
        self._reader = reader

    async def deltas(self) -> AsyncGenerator[list[MessageDelta]]:
        """The new parts of the messages as they arrive. Closing it aborts unfinished requests.

        Raises:
            PagodaError: the request was refused or failed.
        """
        async with aclosing(self.run.deltas()) as stream:
            async for deltas in stream:
                yield [self._reader.read(delta) for delta in deltas]

    async def collect(self) -> list[CollectedMessage]:
        """Every message, whole, in order of index; raises as `deltas`."""
        collectors = [MessageCollector(index) for index in range(self.run.num_sequences)]
        async with aclosing(self.deltas()) as stream:
            async for deltas in stream:
                for delta in deltas:
                    hold_kept(delta, num_sequences=self.run.num_sequences)
                    collectors[delta.index].add(delta)
        return [collector.finish() for collector in collectors]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as of now."""
        usage = self.run.usage()
        if self._reader.counts_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reader.num_reasoning_tokens}
        return usage


async def start_conversation(
    body: ChatBody,
    call: CallContext,
    *,
    serving: Serving,
    beam_search: BeamSearchParams | None = None,
    is_budget_wish: bool = False,
) -> Conversation:
    """Check `body`, render and tokenize its messages, and make the run; generation starts when the run is read.

    Args:
        beam_search: used instead of the body's value.
        is_budget_wish: the body's reasoning budget is ignored where it cannot be enforced.

    Raises:
        InvalidRequest: `field` names the field.
        NotFound: there is no model of that name.
        NotReady: the model is not known yet.
    """
    await serving.look_for(body.model)
    model, dialect, work = serving.model_named(body.model), serving.dialect, serving.work
    asked = await work.prepare(lambda: _asked(body, model=model, serving=serving, beam_search=beam_search))
    plan, params = asked.plan, asked.params
    template = trusted_chat_template(body.chat_template, serving=serving)
    text = await model.prompts.render(
        with_readable_ids(body.messages, dialect.tool_parser),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_kwargs(body),
        chat_template=template,
        tools=plan.tools,
        documents=body.documents,
    )
    prompt = await model.prompts.from_text(
        text,
        add_special_tokens=bool(body.add_special_tokens),
        field="messages",
        truncation=body_truncation(body, params=params, model=model),
    )

    def constrained() -> MessageReader:
        """The reader of the answer; the matching constraint is added to `params`."""
        reader = dialect.reader(
            plan,
            prompt=text,
            tokenizer=model.tokenizer,
            n=params.n,
            shows_reasoning=body.include_reasoning is not False,
            id_seed=call.engine_id,
            template=model.prompts.template(template, tools=plan.tools),
            variables=template_kwargs(body),
        )
        if reader.needs_special_tokens:
            params.skip_special_tokens = False
        constraint = constraint_of(plan, dialect.tool_parser, asked=params.structured_outputs)
        if constraint is not None:  # which holds for the answer alone
            constraint = replace(constraint, start_after_token_ids=reader.reasoning_end)
        params.structured_outputs = with_thinking_budget(
            constraint,
            body.thinking_token_budget,
            dialect=dialect,
            prompt=text,
            tokenizer=model.tokenizer,
            max_model_len=model.max_model_len,
            is_wish=is_budget_wish,
        )
        return reader

    reader = await work.prepare(constrained)
    await model.grammars.check(params.structured_outputs, field=constraint_field(body))
    run = start_run(
        call,
        serving=serving,
        model=model,
        prompts=[prompt],
        params=params,
        field="messages",
        cache_salt=body.cache_salt,
        beam_search=asked.choices.beam_search,
    )
    return Conversation(run=run, prompt=prompt, logprobs=asked.logprobs, reader=reader)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A checked body."""

    plan: ToolPlan
    logprobs: LogprobWriter | None
    choices: Choices
    params: SamplingParams


def _asked(body: ChatBody, *, model: ServedModel, serving: Serving, beam_search: BeamSearchParams | None) -> _Asked:
    """Raises InvalidRequest; `field` names the field."""
    max_logprobs = serving.config.max_logprobs
    plan = plan_tools(body, can_choose=serving.dialect.can_choose)
    num_top = num_top_logprobs(body, max_logprobs=max_logprobs, vocab_size=model.vocab_size)
    choices = choices_of(body, best_of=None, with_logprobs=num_top is not None, beam_search=beam_search)
    has_new_name = body.max_completion_tokens is not None
    with fields_named({"max_tokens": "max_completion_tokens"} if has_new_name else {}):
        params = sampling_params_of(
            body,
            model=model,
            max_logprobs=max_logprobs,
            choices=choices,
            logprobs=num_top,
            max_tokens=body.max_completion_tokens if has_new_name else body.max_tokens,
        )
    logprobs = logprob_writer(body, model.tokenizer, num_top, as_token_ids=serving.config.return_tokens_as_token_ids)
    return _Asked(plan=plan, logprobs=logprobs, choices=choices, params=params)
