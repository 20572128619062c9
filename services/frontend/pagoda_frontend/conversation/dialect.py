"""Dialect: which parsers read the served model's text, and what they need from it. Built once from the flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.conversation.message_reader import MessageParser, MessageReader
from pagoda_frontend.conversation.tool_constraint import frames_of
from pagoda_frontend.conversation.tools import ToolPlan
from pagoda_frontend.reasoning_parsers.base import ReasoningParser
from pagoda_frontend.reasoning_parsers.registry import find_reasoning_parser
from pagoda_frontend.tool_parsers.base import ToolParser
from pagoda_frontend.tool_parsers.json_calls import RequiredCallsParser
from pagoda_frontend.tool_parsers.named import NamedCallParser
from pagoda_frontend.tool_parsers.registry import find_tool_parser, load_plugin

THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """The parsers of one model."""

    tool_parser: type[ToolParser] | None = None
    """None: the format of the model's tool calls is not known."""
    can_choose: bool = False
    """The model may decide by itself to call tools."""
    reasoning_parser: type[ReasoningParser] | None = None
    """None: all text is the answer."""

    def reader(
        self,
        plan: ToolPlan,
        *,
        prompt: str,
        tokenizer: Tokenizer,
        n: int,
        shows_reasoning: bool = True,
        id_seed: str = "",
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> MessageReader:
        """A reader of `n` messages that continue `prompt` (rendered).

        Args:
            shows_reasoning: reasoning is part of the messages; else it is parsed and dropped.
            id_seed: seed of the ids of calls.
            template, variables: as in reasoning_end.
        """
        made = [self.parser(plan, prompt=prompt, id_seed=f"{id_seed}/{index}") for index in range(n)]
        return MessageReader(
            parsers=[parser for parser in made if parser is not None],
            is_named=plan.choice == "named",
            shows_reasoning=shows_reasoning,
            counts_reasoning=self.reasoning_parser is not None,
            reasoning_end=self.reasoning_end(
                prompt=prompt, tokenizer=tokenizer, template=template, variables=variables
            ),
            needs_special_tokens=self.needs_special_tokens(plan, tokenizer),
        )

    def parser(self, plan: ToolPlan, *, prompt: str, id_seed: str = "") -> MessageParser | None:
        """A parser for one message that continues `prompt` (rendered); None if all of its text is content.

        `id_seed`: seed of the ids of its calls.
        """
        calls: ToolParser | None = None
        if plan.choice != "none" and self._writes_calls(plan):
            assert self.tool_parser is not None
            calls = self.tool_parser(schemas=plan.schemas)
        elif plan.choice == "required":
            calls = RequiredCallsParser(schemas=plan.schemas)
        elif plan.choice == "named":
            calls = NamedCallParser(schemas=plan.schemas, name=plan.name)
        if calls is not None:
            calls.is_constrained = plan.choice != "auto"
            calls.is_strict = plan.has_strict_tools
            calls.id_seed = id_seed
            if self.tool_parser is not None:
                calls.make_id = self.tool_parser.call_id
        reasoning = self.reasoning_parser(prompt=prompt) if self.reasoning_parser is not None else None
        if calls is None and reasoning is None:
            return None
        if calls is not None and calls.splits_reasoning:
            reasoning = None
        if calls is not None and reasoning is not None:
            reasoning.call_openers = calls.openers
        return MessageParser(reasoning=reasoning, calls=calls, is_parallel=plan.is_parallel)

    def _writes_calls(self, plan: ToolPlan) -> bool:
        """Whether calls come in the model's own format: because it chooses freely, or because a constraint can enforce
        it."""
        return plan.choice == "auto" or frames_of(self.tool_parser, plan) is not None

    def needs_special_tokens(self, plan: ToolPlan, tokenizer: Tokenizer) -> bool:
        """Whether a parser looks for markers that are special tokens."""
        markers: tuple[str, ...] = ()
        if self.reasoning_parser is not None:
            markers += self.reasoning_parser.markers
        if plan.choice != "none" and self.tool_parser is not None and self._writes_calls(plan):
            markers += self.tool_parser.markers
        ids = [token_id for marker in markers if (token_id := tokenizer.token_id(marker)) is not None]
        return any(not tokenizer.decode([token_id]) for token_id in ids)

    def reasoning_end(
        self,
        *,
        prompt: str,
        tokenizer: Tokenizer,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The token after which the answer begins. Empty where the answer begins at once, and where no single token
        ends the reasoning: then it is unknown where a constraint begins.

        Args:
            template: Jinja text of the chat template. A template without the marker belongs to a model that answers at
            once, unless its parser assumes reasoning. None: the template is not known. variables: of the template; they
            may switch thinking off.
        """
        if self.reasoning_parser is None:
            return ()
        parser = self.reasoning_parser(prompt=prompt)
        is_off = any((variables or {}).get(name) is False for name in THINKING)
        knows_reasoning = template is None or any(marker in template for marker in parser.markers or (parser.end,))
        if parser.is_over or (not parser.is_inside and (is_off or not knows_reasoning)):
            return ()
        token_id = tokenizer.token_id(self.reasoning_parser.end) if self.reasoning_parser.end else None
        return () if token_id is None else (token_id,)


def dialect_of(config: FrontendConfig) -> Dialect:
    """The parsers that `config` names, plugins loaded.

    Raises:
        ConfigError: there is no parser of that name, or a plugin fails.
    """
    if config.tool_parser_plugin is not None:
        load_plugin(config.tool_parser_plugin, field="tool_parser_plugin")
    if config.reasoning_parser_plugin is not None:
        load_plugin(config.reasoning_parser_plugin, field="reasoning_parser_plugin")
    name, can_choose = config.tool_call_parser, config.enable_auto_tool_choice
    if name is None and config.model == EMBEDDED_MODEL:
        name, can_choose = "hermes", True
    return Dialect(
        tool_parser=find_tool_parser(name) if name is not None else None,
        can_choose=can_choose,
        reasoning_parser=find_reasoning_parser(config.reasoning_parser) if config.reasoning_parser else None,
    )
