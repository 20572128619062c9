"""Calls as ``<invoke name="NAME">`` with a tag for each argument: DeepSeek V3.2 and V4, MiniMax M2, Step 3."""

import re
from typing import Any, ClassVar

from pagoda_frontend.tool_parsers import formats
from pagoda_frontend.tool_parsers.argument_formats import ended, is_any_object, tagged_arguments, text_without
from pagoda_frontend.tool_parsers.formats import Format, Schemas
from pagoda_frontend.tool_parsers.values import checked, json_value, typed_value
from pagoda_frontend.tool_parsers.xml import TaggedArgumentsParser


class InvokeParser(TaggedArgumentsParser):
    """Reads invokes whose tags begin with `prefix`. Subclasses define the markers around them."""

    keeps_space = True
    is_whole = True
    prefix: ClassVar[str] = ""
    """Prefix of tag names."""
    stops = (">", "<", "\n")
    string_mark: ClassVar[str] = ""
    """Attribute of a value that is a string."""
    json_mark: ClassVar[str] = ""
    """Attribute of a value that is JSON."""
    around: ClassVar[tuple[str, str]]
    """Text before and after the calls, with line breaks."""

    def __init_subclass__(cls) -> None:
        tag = re.escape(cls.prefix)
        cls.starts = (f"<{cls.prefix}invoke name=",)
        cls.name = re.compile(r"""[ ]*["']?([^<>"'\n]+)["']?[ ]*>""")
        cls.key_start = f"<{cls.prefix}parameter"
        cls.key = re.compile(rf"""<{tag}parameter[ \t]+name=["']?([^<>"'\n]+)["']?([^<>\n]*)>""")
        cls.ends = (f"</{cls.prefix}invoke>", cls.around[1].strip())
        cls.value_ends = (f"</{cls.prefix}parameter>", f"<{cls.prefix}parameter ", *cls.ends)

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        calls = [formats.tag(f'{cls.starts[0]}"{name}">', cls._arguments(name, schemas[name])) for name in schemas]
        begin, end = cls.around
        listed = formats.listed(calls, separator="\n", is_parallel=is_parallel)
        return formats.triggered(begin.split("\n")[0], tags=[formats.tag(begin, listed, end)], is_parallel=False)

    @classmethod
    def _arguments(cls, name: str, schema: dict[str, Any]) -> Format:
        end = cls.ends[0]
        if is_any_object(schema):
            return ended(f"{text_without((*cls.ends, *cls.starts))}*", end)
        arguments = tagged_arguments(
            name,
            schema,
            key_ends=(f'<{cls.prefix}parameter name="', f'"{cls.string_mark}>'),
            json_key_end=f'"{cls.json_mark}>',
            end=f"{cls.value_ends[0]}\n",
            stops=(*cls.value_ends, *cls.starts),
        )
        return formats.sequence(formats.text("\n"), arguments, formats.text(end))


class DeepSeekV32Parser(InvokeParser):
    """``<｜DSML｜function_calls>``, whose parameters have ``string="true"`` or ``"false"``.

    Outside of the marker there are no calls.
    """

    prefix = "｜DSML｜"
    has_line_breaks = False
    string_mark = ' string="true"'
    json_mark = ' string="false"'
    around = ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>")
    ignored = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    section = ignored
    openers = ignored[:1]
    markers = (*ignored, "｜DSML｜")

    def _value(self, match: re.Match[str], key: str, text: str) -> Any:
        if 'string="true"' in match[2]:
            return text
        if 'string="false"' in match[2]:
            try:
                return checked(json_value(text))
            except (ValueError, RecursionError):
                pass
        return typed_value(text, self._properties.get(key), self._schema)

    def _is_text(self, match: re.Match[str], key: str) -> bool:
        is_said = [f'string="{word}"' in match[2] for word in ("true", "false")]
        return is_said[0] or (not is_said[1] and super()._is_text(match, key))


class DeepSeekV4Parser(DeepSeekV32Parser):
    """The same within ``<｜DSML｜tool_calls>``."""

    around = ("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>")
    ignored = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    section = ignored
    openers = ignored[:1]
    markers = (*ignored, "｜DSML｜")


class MinimaxM2Parser(InvokeParser):
    """``<minimax:tool_call>``, outside of which there are no calls."""

    around = ("<minimax:tool_call>\n", "\n</minimax:tool_call>")
    ignored = ("<minimax:tool_call>", "</minimax:tool_call>")
    section = ignored
    openers = ignored[:1]
    markers = ignored


class Step3Parser(InvokeParser):
    """``<｜tool_calls_begin｜>``, and each call between markers of its own."""

    keeps_space = False
    is_whole = False
    prefix = "steptml:"
    around = ("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>")
    ignored = (
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "function<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    )
    openers = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    markers = (
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    )

    @classmethod
    def free_format(cls, schemas: Schemas, *, is_parallel: bool) -> Format:
        begin, end = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
        calls = []
        for name, schema in schemas.items():
            calls.append(formats.tag(f'{begin}{cls.starts[0]}"{name}">', cls._arguments(name, schema), end))
        listed = formats.listed(calls, separator="", is_parallel=is_parallel)
        tags = [formats.tag(cls.ignored[0], listed, cls.ignored[1])]
        return formats.triggered(cls.ignored[0], tags=tags, is_parallel=False)
