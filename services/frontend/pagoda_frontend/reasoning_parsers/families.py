"""The reasoning parsers of model families."""

from pagoda_frontend.reasoning_parsers.base import ReasoningParser, TaggedAnswerParser, TaggedReasoningParser
from pagoda_frontend.tool_parsers.harmony import HarmonyParser


class DeepSeekR1Parser(TaggedReasoningParser):
    """``<think>…</think>``, begun by the prompt or by the model, always there.

    DeepSeek R1, Qwen 3 Thinking, QwQ, MiniMax M2.
    """

    start = "<think>"
    end = "</think>"
    markers = ("<think>", "</think>")
    trims = False
    is_assumed = True
    tells_empty = True


class ThinkParser(DeepSeekR1Parser):
    """The same, but a message without thoughts has no reasoning (None): OLMo 3 Think, Step 3, Nemotron 3."""

    tells_empty = False


class Step3p5Parser(ThinkParser):
    """The same, but one line break before the end tag and one after it are part of the tag: Step 3.5."""

    def _without_end(self, text: str) -> str:
        return text.removesuffix("\n")

    def _without_start(self, text: str) -> str:
        return text.removeprefix("\n")


class Qwen3Parser(ThinkParser):
    """The same, but the model may also answer at once: Qwen 3, GLM 4.5, SmolLM 3."""

    is_assumed = False


class KimiK2ReasoningParser(Qwen3Parser):
    """The same for Kimi K2 Thinking."""

    tells_empty = True


class MistralReasoningParser(TaggedReasoningParser):
    """``[THINK]…[/THINK]``: Magistral."""

    start = "[THINK]"
    end = "[/THINK]"
    markers = ("[THINK]", "[/THINK]")
    trims = False


class GraniteReasoningParser(TaggedReasoningParser):
    """Two sentences around the reasoning: Granite 3.2."""

    start = "Here is my thought process:"
    end = "Here is my response:"


class SeedOssReasoningParser(TaggedReasoningParser):
    """``<seed:think>…</seed:think>``: Seed-OSS."""

    start = "<seed:think>"
    trims = False
    end = "</seed:think>"
    markers = ("<seed:think>", "</seed:think>")
    is_assumed = True


class Gemma4ReasoningParser(TaggedReasoningParser):
    """The channel called thought: Gemma 4."""

    start = "<|channel>"
    end = "<channel|>"
    markers = ("<|channel>", "<channel|>")
    trims = False
    label = "thought\n"


class HunyuanReasoningParser(TaggedAnswerParser):
    """``<think>…</think>`` and ``<answer>…</answer>``: Hunyuan A13B."""

    start = "<think>"
    end = "</think>"
    markers = ("<think>", "</think>", "<answer>", "</answer>")
    answer_tags = ("<answer>", "</answer>")


class Ernie45ReasoningParser(TaggedAnswerParser):
    """``…</think>``, begun by the prompt, and ``<response>…</response>``: ERNIE 4.5 Thinking."""

    start = "<think>"
    end = "</think>"
    markers = ("<think>", "</think>", "<response>", "</response>")
    answer_tags = ("<response>", "</response>")
    is_assumed = True


class MinimaxAppendThinkParser(ReasoningParser):
    """All text is the answer, with the ``<think>`` that the prompt already contains: MiniMax M2, for clients that send
    its reasoning back."""

    end = "</think>"
    markers = ("<think>", "</think>")

    def __init__(self, *, prompt: str) -> None:
        super().__init__(prompt=prompt)
        self.is_over = prompt.rstrip().endswith(self.end)
        self._missing = "" if self.is_over else "<think>"
        self._tail = ""

    def append(self, text: str) -> tuple[str, str]:
        if not text:
            return "", ""
        self._tail = (self._tail + text)[-len(self.end) - len(text) + 1 :]
        self.is_over = self.is_over or self.end in self._tail
        text, self._missing = self._missing + text, ""
        return "", text

    def finish(self) -> tuple[str, str]:
        text, self._missing = self._missing, ""
        return "", text


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
