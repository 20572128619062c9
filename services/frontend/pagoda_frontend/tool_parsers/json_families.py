"""Families of models that write calls as JSON between their own markers."""

import json

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.json_calls import HermesParser, JsonToolParser


class GraniteParser(JsonToolParser):
    """``<|tool_call|>[{"name": …, "arguments": …}, …]``: Granite 3."""

    starts = ("<|tool_call|>", "<tool_call>")
    end = "</tool_call>"
    markers = ("<|tool_call|>", "<tool_call>")
    openers = starts
    calls_in_array = True


class Ernie45Parser(HermesParser):
    """Hermes' format, with line breaks around calls that are not content: ERNIE 4.5."""

    keeps_space = False


class Granite20bParser(JsonToolParser):
    """``<function_call> {"name": …, "arguments": …}``, one after the other: Granite 20B for function calling."""

    keeps_space = True
    starts = ("<function_call>",)
    markers = starts
    openers = starts
    trigger = "<function_call>"
    separator = " "

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'<function_call> {{"name": {json.dumps(name)}, "arguments": ', "}"


class Phi4MiniJsonParser(JsonToolParser):
    """``functools[{"name": …, "arguments": …}, …]``: Phi-4-mini."""

    starts = ("functools",)
    markers = starts
    calls_in_array = True


class ToolCallsArrayParser(JsonToolParser):
    """``<tool_calls>[{"name": …, "arguments": …}, …]</tool_calls>``: Jamba, Hunyuan A13B. No text follows."""

    keeps_space = True
    drops_rest = True
    starts = ("<tool_calls>",)
    end = "</tool_calls>"
    markers = ("<tool_calls>", "</tool_calls>")
    openers = starts
    calls_in_array = True
    array_end = end


class MinimaxParser(ToolCallsArrayParser):
    """``<tool_calls>`` and a call on each line, without an array: MiniMax M1. Its markers are not content."""

    keeps_space = False
    drops_rest = False
    needs_arguments = True
    hides_markers = True


class InternLMParser(JsonToolParser):
    """``<|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>``: InternLM 2 and 3."""

    keeps_space = True
    starts = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    end = "<|action_end|>"
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    openers = starts
    trigger = starts[0]

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n{{"name": {json.dumps(name)}, "parameters": ', f"}}{cls.end}"


class LongcatParser(HermesParser):
    """Hermes' format with another tag: LongCat-Flash."""

    starts = ("<longcat_tool_call>",)
    end = "</longcat_tool_call>"
    markers = ("<longcat_tool_call>", "</longcat_tool_call>")
    openers = starts
    trigger = "<longcat_tool_call>"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{cls.end}"


class GigaChat3Parser(JsonToolParser):
    """``<|function_call|>{"name": …, "arguments": {…}}``, or the same as a message of its own: GigaChat 3.1 and 3."""

    keeps_space = True
    drops_rest = True
    needs_arguments = True
    starts = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n", "<|function_call|>")
    end = "</s>"
    markers = ("<|message_sep|>", "<|role_sep|>", "<|function_call|>")
    openers = starts

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        """One call, which ends the text."""
        tags = [
            formats.tag(f'{start}{{"name": {json.dumps(name)}, "arguments": ', formats.json_value(schema), "}")
            for start in cls.starts[1:]
            for name, schema in schemas.items()
        ]
        return formats.triggered(*cls.starts[1:], tags=tags, is_parallel=False)
