"""Families of models that write calls as JSON between their own markers."""

import json

from pagoda_frontend.tool_parsers.json_calls import HermesParser, JsonToolParser


class GraniteParser(JsonToolParser):
    """``<|tool_call|>[{"name": …, "arguments": …}, …]``: Granite 3."""

    starts = ("<|tool_call|>", "<tool_call>")
    end = "</tool_call>"
    markers = ("<|tool_call|>", "<tool_call>")
    openers = starts
    calls_in_array = True


class Granite20bParser(JsonToolParser):
    """``<function_call> {"name": …, "arguments": …}``, one behind the other: Granite 20B for function calling."""

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
    """``<tool_calls>[{"name": …, "arguments": …}, …]</tool_calls>``: Jamba, Hunyuan A13B; MiniMax M1 without array."""

    starts = ("<tool_calls>",)
    end = "</tool_calls>"
    markers = ("<tool_calls>", "</tool_calls>")
    openers = starts
    calls_in_array = True
    array_end = end


class InternLMParser(JsonToolParser):
    """``<|action_start|><|plugin|>{"name": …, "parameters": …}<|action_end|>``: InternLM 2 and 3."""

    starts = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    end = "<|action_end|>"
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    openers = starts
    trigger = starts[0]

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n{{"name": {json.dumps(name)}, "parameters": ', f"}}{cls.end}"


class LongcatParser(HermesParser):
    """Hermes' way with a tag of its own: LongCat-Flash."""

    starts = ("<longcat_tool_call>",)
    end = "</longcat_tool_call>"
    markers = ("<longcat_tool_call>", "</longcat_tool_call>")
    openers = starts
    trigger = "<longcat_tool_call>"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{cls.end}"
