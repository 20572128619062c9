"""Renders a conversation by the model's Jinja template, in the sandbox that transformers uses. Knows no token ids.

Templates come with checkpoints and are not to be trusted: they run in Jinja's immutable sandbox, see plain JSON data
only, and get neither the real `dict` nor a namespace that stores underscored names.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagoda_common.errors import ConfigError, InvalidRequest

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of what an assistant thought."""
FINAL_MARK = "CONTINUE_FINAL_MESSAGE_HERE "
"""Written after the final message to find its end. A template that trims messages takes its space away."""

UNKNOWN_ROLE = "a-role-of-no-template"
"""Shows whether a template writes roles that it does not name."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """`dict` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that stores no underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot store {name!r} in a namespace")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def _plain(value: Any) -> Any:
    """`value` rebuilt of plain JSON types; anything else becomes the name of its type."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def render_chat_template(
    source: str, *, messages: list[dict[str, Any]], continue_final_message: bool = False, **variables: Any
) -> str:
    """The prompt text of a conversation.

    Args:
        source: Jinja text.
        messages: role and content, as in OpenAI's chat API; a developer is the system where the template knows none.
        continue_final_message: end where the content of the last message ends, so that the model continues it.
        variables: what else the template may look at (tools, add_generation_prompt, bos_token, …).

    Raises:
        InvalidRequest: the template is broken or refuses the messages; `field` says which of the two.
    """
    try:
        template = _compile(source)
    except TemplateError as error:
        raise InvalidRequest(f"the chat template is not valid Jinja: {error}", field="chat_template") from error
    if "developer" not in source:
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]
    messages = [_with_reasoning(message) for message in messages]
    if continue_final_message:
        final = messages[-1]
        messages = [*messages[:-1], {**final, "content": (final.get("content") or "") + FINAL_MARK}]
    try:
        text = template.render(messages=_plain(messages), **{name: _plain(value) for name, value in variables.items()})
    except Exception as error:  # whatever a template does with messages it was not made for
        raise InvalidRequest(f"the chat template refused the messages: {error}", field="messages") from error
    return _cut_at_mark(text) if continue_final_message else text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with its reasoning under every name that templates know."""
    given = next((text for name in REASONING if (text := message.get(name)) is not None), None)
    if given is None:
        return message
    others = {name: given for name in ("reasoning_content", "reasoning") if message.get(name) is None}
    return {"thinking": given, **message, **others}


def _cut_at_mark(text: str) -> str:
    """`text` up to the end of the final message; a template that trims messages has trimmed this one as well."""
    place = text.rfind(FINAL_MARK.rstrip())
    if place < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the final message as it is", field="messages"
        )
    return text[:place] if text.startswith(FINAL_MARK, place) else text[:place].rstrip()


def has_role(source: str, role: str) -> bool:
    """Whether a template names a role, or writes whatever role a message has."""
    return f"'{role}'" in source or f'"{role}"' in source or _writes_any_role(source)


@lru_cache(maxsize=64)
def _writes_any_role(source: str) -> bool:
    user = {"role": "user", "content": "a question"}
    unknown = {"role": UNKNOWN_ROLE, "content": "its content"}
    for messages in ([unknown], [user, unknown]):
        try:
            text = render_chat_template(source, messages=messages, add_generation_prompt=True)
        except InvalidRequest:
            continue
        if UNKNOWN_ROLE in text and "its content" in text:
            return True
    return False


def load_chat_template(value: str | None) -> str | None:
    """The template that a flag names: a file, or the text itself.

    Raises:
        ConfigError: the file cannot be read.
    """
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {value!r} cannot be read: {error}", field="chat_template") from error


def check_template(source: str, *, name: str, field: str) -> None:
    """Raises ConfigError where `source` is not Jinja; the message begins with `name`."""
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{name} is not a Jinja template: line {error.lineno}: {error.message}", field=field
        ) from error
    except Exception as error:  # of names and literals that the compiler meets
        raise ConfigError(f"{name} is not a Jinja template: {error}"[:500], field=field) from error
