"""Text of every script: through the tokenizer and back, into prompts, out of streams."""

import unicodedata

import pytest

from tests.conformance.api import COMPLETIONS, MODEL, Api, Json

TEXTS = {
    "ascii": "Hello, world!",
    "two bytes": "naïve café – Größe",
    "three bytes": "日本語のテキスト",
    "four bytes": "🙂🚀𝔘𝔫𝔦",
    "joined emoji": "👩‍👩‍👧‍👦 🏳️‍🌈",
    "a flag and a skin tone": "🇩🇪👍🏽",
    "right to left": "שלום עולם مرحبا بالعالم",
    "both directions": "abc אבג 123 مرحبا xyz",
    "combining marks": unicodedata.normalize("NFD", "Ångström é ñ"),
    "devanagari": "नमस्ते दुनिया",
    "thai": "สวัสดีชาวโลก",
    "hangul": "안녕하세요",
    "spaces of many kinds": " \t\n\r\n\u00a0\u2003\u200b|",
    "control characters": "a\x00b\x07c\x1b[0m",
    "the last code points": "\uffff\U0010ffff",
    "a replacement character": "a\ufffdb",
    "quotes and backslashes": "\"'\\\\n{}[]<>&%",
    "a code block": "```python\nprint('x')\n```\n",
    "a byte order mark": "\ufeffabc",
    "one long word": "a" * 300,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokens_and_back(api: Api, text: str) -> None:
    answer = api.ok("/tokenize", {"model": MODEL, "prompt": text})
    assert answer["count"] == len(answer["tokens"])
    assert api.ok("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})["prompt"] == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_prompt_is_echoed_to_the_letter(api: Api, text: str) -> None:
    answer = api.text(prompt=text, echo=True, max_tokens=2)
    assert answer.startswith(text)
    stream = api.stream(COMPLETIONS, {"model": MODEL, "prompt": text, "echo": True, "max_tokens": 2, "temperature": 0})
    assert stream.text() == answer


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_message_may_hold_it(api: Api, text: str) -> None:
    assert api.chat(text, max_tokens=4)["usage"]["prompt_tokens"] > len(api.token_ids(text))


SCRIPTS = ["naïve café", "日本語", "🙂🚀", "👩‍👩‍👧", "שלום", "नमस्ते", "안녕"]


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_pieces_of_characters_make_the_same_text_streamed_and_whole(api: Api, text: str, seed: int) -> None:
    """Only the tokens of `text` may be sampled, in any order: many are parts of characters, and many do not fit."""
    fields: Json = {"allowed_token_ids": sorted(set(api.token_ids(text))), "temperature": 2.0, "seed": seed}
    body: Json = {"model": MODEL, "prompt": "a", "max_tokens": 60, "return_token_ids": True, **fields}
    [choice] = api.complete(**body)["choices"]
    assert api.stream(COMPLETIONS, body).text() == choice["text"]
    # A character that is still open at the end is left out or marked; all before it is what the tokens say.
    whole = api.ok("/detokenize", {"model": MODEL, "tokens": choice["token_ids"]})["prompt"]
    assert whole.rstrip("\ufffd").startswith(choice["text"].rstrip("\ufffd"))
    assert len(whole.rstrip("\ufffd")) - len(choice["text"].rstrip("\ufffd")) <= 1


def test_token_strings(api: Api) -> None:
    answer = api.ok("/tokenize", {"model": MODEL, "prompt": "Hello, world!", "return_token_strs": True})
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]) == "Hello,Ġworld!"  # as the tokenizer writes them
    assert answer["max_model_len"] == 1024


def test_token_strings_are_given_only_when_asked_for(api: Api) -> None:
    assert not api.ok("/tokenize", {"model": MODEL, "prompt": "Hello"}).get("token_strs")


def test_a_conversation_is_tokenized_as_a_chat_sees_it(api: Api) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    answer = api.ok("/tokenize", {"model": MODEL, "messages": messages})
    assert answer["count"] == api.chat("Hello!")["usage"]["prompt_tokens"]
    rendered = api.ok("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})["prompt"]
    assert rendered == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_without_the_prompt_of_the_assistant(api: Api) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    answer = api.ok("/tokenize", {"model": MODEL, "messages": messages, "add_generation_prompt": False})
    rendered = api.ok("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})["prompt"]
    assert rendered.rstrip("\n") == "<|im_start|>user\nHello!<|im_end|>"


def test_no_tokens_are_no_text(api: Api) -> None:
    assert api.ok("/detokenize", {"model": MODEL, "tokens": []})["prompt"] == ""
    assert api.ok("/tokenize", {"model": MODEL, "prompt": ""})["tokens"] == []


@pytest.mark.parametrize("tokens", [[3072], [-1], ["a"], "a", None, [1.5], [2**40]], ids=str)
def test_what_is_no_token_cannot_be_detokenized(api: Api, tokens: object) -> None:
    api.refused("/detokenize", {"model": MODEL, "tokens": tokens}, param="tokens")
