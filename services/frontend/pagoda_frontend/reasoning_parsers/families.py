"""How the families of models mark their reasoning."""

from pagoda_frontend.reasoning_parsers.base import ReasoningParser, TaggedReasoningParser
from pagoda_frontend.tool_parsers.harmony import HarmonyParser


class DeepSeekR1Parser(TaggedReasoningParser):
    """``<think>…</think>``, begun by the prompt or by the model, always there: DeepSeek R1, Qwen 3 Thinking, QwQ."""

    start = "<think>"
    end = "</think>"
    markers = ("<think>", "</think>")
    is_assumed = True


class Qwen3Parser(DeepSeekR1Parser):
    """The same where the model may also answer at once: Qwen 3, GLM 4.5, SmolLM 3."""

    is_assumed = False


class MistralReasoningParser(TaggedReasoningParser):
    """``[THINK]…[/THINK]``: Magistral."""

    start = "[THINK]"
    end = "[/THINK]"
    markers = ("[THINK]", "[/THINK]")


class GraniteReasoningParser(TaggedReasoningParser):
    """Two sentences around the reasoning: Granite 3.2."""

    start = "Here is my thought process:"
    end = "Here is my response:"


class HarmonyReasoningParser(ReasoningParser):
    """The analysis channel of gpt-oss."""

    markers = HarmonyParser.markers

    def __init__(self, *, prompt: str) -> None:
        super().__init__(prompt=prompt)
        self._channels = HarmonyParser(schemas={}, tells_calls=False)

    def append(self, text: str) -> tuple[str, str]:
        piece = self._channels.append(text)
        return piece.reasoning, piece.content

    def finish(self) -> tuple[str, str]:
        piece = self._channels.finish()
        return piece.reasoning, piece.content
