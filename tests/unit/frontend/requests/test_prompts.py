"""Prompts from conversations."""

import re
from pathlib import Path

import pytest

from pagoda_common.errors import ConfigError, InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.chat_template import load_chat_template
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.protocol import ChatMessage
from pagoda_frontend.requests.prompts import Prompts, template_message


def prompts(chat_template: str | None = None) -> Prompts:
    tokenizer = Tokenizer.load("pagoda-tiny")
    return Prompts(tokenizer=tokenizer, chat_template=chat_template, max_model_len=64, vocab_size=3072)


def message(role: str, content: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content})


async def test_a_text_that_cannot_fit_is_refused_untokenized() -> None:
    with pytest.raises(RequestTooLong, match="at least 78125 tokens") as caught:
        await prompts().from_text("x" * 10_000_000, add_special_tokens=True, field="prompt")
    assert caught.value.field == "prompt"


async def test_a_text_that_is_to_be_cut_may_be_of_any_length() -> None:
    text = "Once upon a time. " * 4000
    found = await prompts().from_text(
        text, add_special_tokens=False, field="prompt", truncation=Truncation(num_tokens=8, side="right")
    )
    assert len(found) == 8


async def test_a_continued_message_ends_where_its_text_ends() -> None:
    messages = [message("user", "hi"), message("assistant", " The answer is ")]
    text = await prompts().render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("The answer is ")


async def test_a_template_of_the_server_is_used_with_the_requests_variables() -> None:
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ mood }}"
    messages = [message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    text = await prompts(template).render(messages, chat_template_kwargs={"mood": "glad"})
    assert text == "[user:a\nb]glad"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ messages[9].role.x }}", "{% if %}"]
)
async def test_a_template_that_fails_is_the_requests_fault(template: str) -> None:
    with pytest.raises(InvalidRequest):
        await prompts(template).render([message("user", "hi")])


def test_a_template_flag_is_a_file_or_the_text(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert load_chat_template(str(path)) == load_chat_template("{{ messages }}") == "{{ messages }}"
    assert load_chat_template(None) is None
    with pytest.raises(ConfigError):
        load_chat_template(str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize("text", ["<", "i", "end", "|", "im_end", "", "hi", " spaced ", "assistant"])
async def test_a_continued_message_is_cut_after_its_text_whatever_that_is(text: str) -> None:
    messages = [message("user", "hi"), message("assistant", text)]
    shown = await prompts().render(messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + text


async def test_a_template_that_trims_messages_trims_the_continued_one() -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    messages = [message("user", " a "), message("assistant", " b ")]
    shown = await prompts(template).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert shown == "[a][b"


async def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        await prompts("{{ messages[0].content }}").render(
            [message("user", "a"), message("assistant", "b")], add_generation_prompt=False, continue_final_message=True
        )


ANY_ROLE = "{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}"


async def test_any_role_is_allowed_where_the_template_writes_roles() -> None:
    assert await prompts(ANY_ROLE).render([message("my-custom-role", "x")]) == "<my-custom-role>x"
    alternating = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + ANY_ROLE
    assert await prompts(alternating).render([message("user", "a"), message("judge", "b")]) == "<user>a<judge>b"
    with pytest.raises(InvalidRequest, match="user first"):
        await prompts(alternating).render([message("judge", "b")])


@pytest.mark.parametrize("role", ["ipython", "observation", "judge"])
async def test_a_role_that_the_template_names_is_allowed(role: str) -> None:
    template = "{% for m in messages %}{% if m.role == '" + role + "' %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert await prompts(template).render([message(role, "x")]) == "[x]"
    with pytest.raises(InvalidRequest, match=rf"messages.0.role is '{role}', must be one of system"):
        await prompts("{{ messages[0].content }}").render([message(role, "x")])


INTEGERS = ["1000000000000000000001", "-18446744073709551616", "9223372036854775808", "18446744073709551615"]


@pytest.mark.parametrize("number", INTEGERS)
@pytest.mark.parametrize("is_text", [True, False])
async def test_integers_in_arguments_keep_every_digit(number: str, is_text: bool) -> None:
    arguments = f'{{"wei": {number}}}'
    call = {"id": "c", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    if not is_text:
        call["function"] = {"name": "pay", "arguments": {"wei": int(number)}}
    answer = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert arguments in await prompts().render([message("user", "hi"), answer])


async def test_a_part_without_text_is_served() -> None:
    empty = {"type": "text", "text": ""}
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    messages = [message("user", [empty]), message("user", [empty, {"type": "text", "text": "a"}])]
    assert await prompts(template).render(messages) == "[][\na]"


def test_parts_of_a_content_are_texts_under_any_of_their_names() -> None:
    content = ["a", {"text": "b"}, {"type": "input_text", "text": "c"}, {"type": "output_text", "text": "d"}]
    content += [{"type": "refusal", "refusal": "e"}, {"type": "text", "text": "f", "cache_control": {}}]
    message = ChatMessage.model_validate({"role": "assistant", "content": content})
    assert template_message(message, 0)["content"] == "a\nb\nc\nd\ne\nf"
    for part, words in (
        ({"type": "image_url", "image_url": {}}, "messages.2.content.0: parts of type 'image_url'"),
        ({"type": "text"}, "messages.2.content.0.text: field required"),
        ({"type": "refusal", "text": "x"}, "messages.2.content.0.refusal: field required"),
    ):
        wrong = ChatMessage.model_validate({"role": "user", "content": [part]})
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            template_message(wrong, 2)
