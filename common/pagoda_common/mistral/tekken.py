"""Converts tekken.json to a tokenizer: a byte-level BPE from ranks of byte strings, special tokens, and a chat
template."""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from pagoda_common.errors import ModelLoadError

TEKKEN = "tekken.json"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""First special token of files that list none: versions before 7."""


def load_tekken(path: Path) -> Tokenizer:
    """Read a tokenizer. Ids: special tokens first, then bytes and their merges by rank.

    Raises:
        ModelLoadError: it is no such file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _made(values)
    except ModelLoadError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise ModelLoadError(f"{path} cannot be read: {type(error).__name__}: {error}", field="tokenizer") from error


def _made(values: dict[str, Any]) -> Tokenizer:
    config = values["config"]
    num_special = int(config["default_num_special_tokens"])
    special = _special(values, num_special)
    entries = values["vocab"][: int(config.get("default_vocab_size") or 1 << 24) - num_special]
    ranks = {base64.b64decode(entry["token_bytes"], validate=True): rank for rank, entry in enumerate(entries)}
    shown = _visible_bytes()
    texts = {token: "".join(shown[byte] for byte in token) for token in ranks}
    vocabulary = {text: ranks[token] + num_special for token, text in texts.items()}
    vocabulary |= {token: index for index, token in enumerate(special)}
    merges = []
    for token in ranks:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(texts[first], texts[second]) for first, second in known]
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return fast


def _special(values: dict[str, Any], count: int) -> list[str]:
    """All special tokens in order of their ids, those without a meaning too."""
    listed = values.get("special_tokens")
    if listed is None:
        names = list(_FIRST_SPECIAL)
    else:
        ordered = sorted(listed, key=lambda token: int(token["rank"]))
        names = [str(token["token_str"]) for token in ordered]
        if [int(token["rank"]) for token in ordered] != list(range(len(names))):
            raise ValueError("ranks of special tokens have gaps")
    return names + [f"<SPECIAL_{index}>" for index in range(len(names), count)]


def _visible_bytes() -> dict[int, str]:
    """GPT-2's character for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


def tekken_template(path: Path) -> str:
    """A chat template for the version of a file.

    Raises:
        ModelLoadError: it is no such file, or of a version that is not known.
    """
    try:
        version = str(json.loads(path.read_text(encoding="utf-8"))["config"]["version"])
        number = int(version.removeprefix("v").partition("m")[0])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{path} has no version: {type(error).__name__}: {error}", field="tokenizer") from error
    if number < 3:
        raise ModelLoadError(f"{path} is of version {version}, must be v3 or later", field="tokenizer")
    if number < 7:
        return _template(system=_SYSTEM_BEFORE_LAST, calls=_CALLS_LIST, result=_RESULT_OBJECT)
    if number < 11:
        return _template(system=_SYSTEM_FIRST, calls=_CALLS_LIST, result=_RESULT_CONTENT)
    if number < 13:
        return _template(system=_SYSTEM_FIRST, calls=_CALLS_WITH_IDS, result=_RESULT_CONTENT)
    return _template(system=_SYSTEM_FIRST, calls=_CALLS_BY_NAME, result=_RESULT_ALONE, tools_at="first")


_SYSTEM_FIRST = "[SYSTEM_PROMPT]{{ text(message) }}[/SYSTEM_PROMPT]"
_SYSTEM_BEFORE_LAST = ""
_CALLS_LIST = (
    "[TOOL_CALLS]["
    "{% for call in message.tool_calls %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ arguments(call) }}, "id": {{ call.id | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_CALLS_WITH_IDS = (
    "{% for call in message.tool_calls %}"
    "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ arguments(call) }}{% endfor %}"
)
_CALLS_BY_NAME = (
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ arguments(call) }}{% endfor %}"
)
_RESULT_OBJECT = (
    '[TOOL_RESULTS]{"content": {{ text(message) | tojson }}, "call_id": {{ message.tool_call_id | tojson }}}'
    "[/TOOL_RESULTS]"
)
_RESULT_CONTENT = "[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ text(message) }}[/TOOL_RESULTS]"
_RESULT_ALONE = "[TOOL_RESULTS]{{ text(message) }}[/TOOL_RESULTS]"


def _template(*, system: str, calls: str, result: str, tools_at: str = "last") -> str:
    """Messages in Mistral's order of control tokens; tools stand before the `first` or `last` message of the user.

    What a tool answers is a text in every version, also where it looks like a number.
    """
    is_inside = not system
    prompt = "{{ held.system }}{{ '\\n\\n' if held.system else '' }}" if is_inside else ""
    return (
        "{%- macro text(message) -%}{%- if message.content is string -%}{{ message.content }}"
        "{%- elif message.content -%}{%- for part in message.content -%}{{ part.text }}{%- endfor -%}"
        "{%- endif -%}{%- endmacro -%}"
        "{%- macro arguments(call) -%}{%- if call.function.arguments is string -%}{{ call.function.arguments }}"
        "{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}{%- endmacro -%}"
        "{%- set held = namespace(system='', first=-1, last=-1) -%}"
        "{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set held.last = loop.index0 -%}"
        "{%- if held.first < 0 -%}{%- set held.first = loop.index0 -%}{%- endif -%}"
        "{%- elif message.role == 'system' -%}{%- set held.system = text(message) -%}{%- endif -%}{%- endfor -%}"
        "{{- bos_token -}}"
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}" + system + "{%- elif message.role == 'user' -%}"
        f"{{%- if loop.index0 == held.{tools_at} and tools -%}}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}"
        "[INST]{%- if loop.index0 == held.last -%}" + prompt + "{%- endif -%}{{ text(message) }}[/INST]"
        "{%- elif message.role == 'assistant' -%}{{ text(message) }}"
        "{%- if message.tool_calls -%}" + calls + "{%- endif -%}{{ eos_token }}"
        "{%- elif message.role == 'tool' -%}" + result + "{%- endif -%}"
        "{%- endfor -%}"
    )
