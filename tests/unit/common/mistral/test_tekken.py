"""tekken.json gives the ids of transformers' converter, and the prompts that mistral-common's templates give."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from pagoda_common.errors import ModelLoadError
from pagoda_common.text import tokenizer as ours

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
NAMES += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
NAMES += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"]
NUM_SPECIAL = 40
TEXTS = (
    "Hello, world! It's 2026; 12345 tokens.",
    "  two  spaces,\n\n newlines \t tabs  ",
    "Grüße, 東京, привет, 👩‍👩‍👧",
    "def f(x):\n    return x ** 2 # comment\r\n",
    "[INST]hi[/INST] there</s>",
    "McDonald's CamelCaseWords and/or\n",
)


def byte_ranks() -> list[bytes]:
    """Bytes, then merges of the repository's documents in their order."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    fast.train([str(path) for path in sorted((Path(__file__).parents[4] / "docs").glob("*.md"))[:6]], trainer)
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
    merges = json.loads(fast.to_str())["model"]["merges"]
    found = [bytes([byte]) for byte in range(256)]
    for pair in merges:
        token = bytes(byte_of[letter] for letter in "".join(pair))
        if token not in found:
            found.append(token)
    return found


def write(directory: Path, *, version: str = "v7", is_listed: bool = True, **changes: Any) -> Path:
    ranks = byte_ranks()
    values: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "default_vocab_size": len(ranks) + NUM_SPECIAL - 5,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(ranks)],
    }
    if is_listed:
        values["special_tokens"] = [{"rank": rank, "token_str": name} for rank, name in enumerate(NAMES)]
    (directory / "tekken.json").write_text(json.dumps(values | changes))
    return directory


def test_ids_are_those_of_transformers_converter(tmp_path: Path) -> None:
    from transformers.integrations.mistral import MistralConverter

    read = ours.Tokenizer.load(str(write(tmp_path)))
    theirs = MistralConverter(str(tmp_path / "tekken.json")).converted()
    for text in (*TEXTS, (Path(__file__).parents[4] / "README.md").read_text()):
        assert read.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
        assert read.decode(read.encode(text)[1:], skip_special_tokens=False) == text
        assert read.encode(text)[0] == 1
    assert (read.bos_token_id, read.eos_token_id, read.vocab_size) == (1, 2, theirs.get_vocab_size())
    assert read.special_token_ids == frozenset(range(NUM_SPECIAL))


def test_files_before_version_7_list_no_special_tokens(tmp_path: Path) -> None:
    read = ours.Tokenizer.load(str(write(tmp_path, version="v3", is_listed=False)))
    assert [read.token_id(name) for name in ("[INST]", "[TOOL_CONTENT]", "<SPECIAL_20>")] == [3, 19, 20]


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "add"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "two"},
]
TOOLS = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "add", "parameters": {}}}][/AVAILABLE_TOOLS]'
LISTED = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'
FIRST = f"<s>[SYSTEM_PROMPT]be kind[/SYSTEM_PROMPT][INST]hi[/INST]hello</s>{TOOLS}[INST]add[/INST]"
PROMPTS = {
    "v3": f"<s>[INST]hi[/INST]hello</s>{TOOLS}[INST]be kind\n\nadd[/INST]{LISTED}"
    '[TOOL_RESULTS]{"content": "two", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    "v7": f"{FIRST}{LISTED}[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]two[/TOOL_RESULTS]",
    "v11": FIRST + '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}</s>'
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]two[/TOOL_RESULTS]",
    "v13": f"<s>[SYSTEM_PROMPT]be kind[/SYSTEM_PROMPT]{TOOLS}[INST]hi[/INST]hello</s>[INST]add[/INST]"
    '[TOOL_CALLS]add[ARGS]{"a": 1}</s>[TOOL_RESULTS]two[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("version", PROMPTS)
def test_prompts_are_those_of_the_version(tmp_path: Path, version: str) -> None:
    read = ours.Tokenizer.load(str(write(tmp_path, version=version)))
    assert read.apply_chat_template(MESSAGES, tools=[TOOL]) == PROMPTS[version]
    assert read.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>[INST]hi[/INST]"


def test_a_template_beside_the_file_comes_first(tmp_path: Path) -> None:
    (write(tmp_path) / "chat_template.jinja").write_text("mine")
    assert ours.Tokenizer.load(str(tmp_path)).apply_chat_template([{"role": "user", "content": "hi"}]) == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": [{"rank": 0}]}, r"tekken\.json cannot be read: KeyError: 'token_bytes'"),
        ({"vocab": [{"token_bytes": "%%"}]}, r"tekken\.json cannot be read: Error"),
        ({"special_tokens": [{"rank": 3, "token_str": "<s>"}]}, "ranks of special tokens have gaps"),
        ({"config": {"version": "v2"}}, r"tekken\.json is of version v2, must be v3 or later"),
        ({"config": {}}, r"tekken\.json has no version"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ours.Tokenizer.load(str(write(tmp_path, **changes)))
