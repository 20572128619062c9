"""Tools and reasoning through the real openai client, in front of an engine whose text is known."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda_common.errors import ConfigError
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.reasoning_parsers import TaggedReasoningParser, register_reasoning_parser
from pagoda_frontend.reasoning_parsers import registry as reasoning_registry
from pagoda_frontend.tool_parsers import registry as tool_registry
from tests.service.frontend.harness import MODEL, Running, running_frontend

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "the time"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


async def whole(frontend: Running, **body: Any) -> tuple[dict[str, Any], str]:
    """The message of a single response, and its finish reason."""
    response = await frontend.post(CHAT, {"model": MODEL, "messages": USER, **body})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"], choice["finish_reason"]


async def streamed(frontend: Running, **body: Any) -> tuple[dict[str, Any], str]:
    """The same, put together from a stream as a client does it."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": []}
    finish_reason = ""
    for chunk in await frontend.events(CHAT, messages=USER, **body):
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        [choice] = chunk["choices"]
        finish_reason = choice["finish_reason"] or finish_reason
        for name in ("content", "reasoning"):
            if text := choice["delta"].get(name):
                message[name] = (message[name] or "") + text
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, finish_reason


async def both(frontend: Running, **body: Any) -> tuple[dict[str, Any], str]:
    """What `whole` and `streamed` agree on."""
    message, finish_reason = await whole(frontend, **body)
    plain = {name: message.get(name) for name in ("content", "reasoning")}
    plain["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    if body.get("tool_choice") is NAMED:
        assert plain["content"] == "", "beside a call that was asked for by name"
        plain["content"] = None
    assert await streamed(frontend, **body) == (plain, finish_reason)
    return plain, finish_reason


def prompt_of(frontend: Running, tokenizer: Tokenizer) -> str:
    prompt = frontend.fake.submits[-1].prompt_token_ids
    ids = [int.from_bytes(prompt[place : place + 4], "little") for place in range(0, len(prompt), 4)]
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_the_model_may_call_tools(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    answer = await frontend.openai.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER, NOW])  # type: ignore[list-item]
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    first, second = choice.message.tool_calls or ()
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": "Rome 🙂"})
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    message, finish_reason = await both(frontend, tools=[WEATHER, NOW])
    assert finish_reason == "tool_calls"
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "now"]
    assert "weather" in prompt_of(frontend, tokenizer)


async def test_without_parallel_calls_there_is_one(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    message, _ = await both(frontend, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert [call["name"] for call in message["tool_calls"]] == ["weather"]


async def test_with_choice_none_the_model_sees_no_tools_and_calls_none(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    message, finish_reason = await both(frontend, tools=[WEATHER], tool_choice="none")
    assert (message["content"], message["tool_calls"], finish_reason) == (CALLS, [], "stop")
    assert "weather" not in prompt_of(frontend, tokenizer)


def tag_of(frontend: Running) -> Any:
    return json.loads(frontend.fake.submits[-1].sampling_params.structured_output.structural_tag)["format"]


async def test_a_named_tool_is_constrained_to_one_call(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    message, finish_reason = await both(frontend, tools=[WEATHER, NOW], tool_choice=NAMED)
    assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Rome"}'}]
    assert (message["content"], finish_reason) == (None, "stop")
    tag = tag_of(frontend)
    [one] = tag["tags"]
    assert one["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
    assert one["content"]["json_schema"] == {**CITY, "additionalProperties": False}
    assert (tag["at_least_one"], tag["stop_after_first"]) == (True, True)


async def test_required_tools_are_constrained_to_calls(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS.removeprefix("I look.\n"))
    message, finish_reason = await both(frontend, tools=[WEATHER, NOW], tool_choice="required")
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "now"]
    assert (message["content"], finish_reason) == (None, "tool_calls")
    tag = tag_of(frontend)
    assert (len(tag["tags"]), tag["at_least_one"], tag["stop_after_first"]) == (2, True, False)
    await whole(frontend, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
    assert tag_of(frontend)["stop_after_first"]


async def test_without_a_parser_required_and_named_tools_are_asked_for_as_json(tokenizer: Tokenizer) -> None:
    async with running_frontend(model="other") as frontend:
        frontend.fake.script = tokenizer.encode('{"city":"Rome"}')
        message, finish_reason = await both(frontend, tools=[WEATHER, NOW], tool_choice=NAMED)
        assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city":"Rome"}'}]
        assert (message["content"], finish_reason) == (None, "stop")
        constraint = frontend.fake.submits[-1].sampling_params.structured_output
        assert json.loads(constraint.json_schema) == {**CITY, "additionalProperties": False}
        frontend.fake.script = tokenizer.encode(
            '[{"name":"now","parameters":{}},{"name":"weather","parameters":{"city":"Oslo"}}]'
        )
        message, finish_reason = await both(frontend, tools=[WEATHER, NOW], tool_choice="required")
        assert message["tool_calls"] == [
            {"name": "now", "arguments": "{}"},
            {"name": "weather", "arguments": '{"city":"Oslo"}'},
        ]
        assert (message["content"], finish_reason) == (None, "tool_calls")
        schema = json.loads(frontend.fake.submits[-1].sampling_params.structured_output.json_schema)
        assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, None)
        await whole(frontend, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
        schema = json.loads(frontend.fake.submits[-1].sampling_params.structured_output.json_schema)
        assert schema["maxItems"] == 1


async def test_a_strict_tool_is_constrained_where_the_model_is_free(frontend: Running) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await whole(frontend, tools=[strict, NOW], max_tokens=2)
    tag = tag_of(frontend)
    assert tag["triggers"] == ["<tool_call>"]
    first, second = (call["content"]["json_schema"] for call in tag["tags"])
    assert (first["required"], second) == (["city"], {"type": "object"})
    await whole(frontend, tools=[WEATHER, NOW], max_tokens=2)
    assert not frontend.fake.submits[-1].sampling_params.HasField("structured_output")


async def test_an_answer_cut_off_within_a_call_ends_by_its_length(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    message, finish_reason = await both(frontend, tools=[WEATHER], max_tokens=24)
    assert finish_reason == "length"
    assert (message["content"][:20], message["tool_calls"]) == ("I look.\n<tool_call>\n", [])
    frontend.fake.script = tokenizer.encode(CALLS.replace("Rome", "Rome" * 100))
    message, finish_reason = await both(frontend, tools=[WEATHER], max_tokens=200)
    assert message["tool_calls"][0]["arguments"].startswith('{"city": "RomeRome')
    assert (message["content"], finish_reason) == ("I look.\n", "length")
    frontend.fake.script = tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}')
    message, finish_reason = await whole(frontend, tools=[WEATHER], tool_choice=NAMED, max_tokens=3)
    assert (message["content"], message["tool_calls"], finish_reason) == ("", [], "length")
    message, _ = await streamed(frontend, tools=[WEATHER], tool_choice=NAMED, max_tokens=3)
    assert (message["content"], message["tool_calls"]) == (None, [])


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": []}, "tools", "empty"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "two tools called 'weather'"),
    ({"tools": function(name="no spaces")}, "tools", "'no spaces'"),
    ({"tools": function(name="")}, "tools", "1 to 128"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools.0"),
    ({"tools": function(parameters={"type": "string"})}, "tools", "object"),
    ({"tools": function(parameters={"properties": {"a": {"type": "x"}}})}, "tools", "properties.a.type"),
    ({"tools": function(parameters={"required": "a"})}, "tools", "required"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": function(), "tool_choice": NAMED}, "tool_choice", "'weather'"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "--trust-request-chat-template"),
    ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "messages.0.content.0: parts of type 'image_url'",
    ),
    ({"messages": [{"role": "", "content": "hi"}]}, "messages", "role"),
]


async def test_wrong_requests_say_what_is_wrong(frontend: Running) -> None:
    for body, param, words in WRONG:
        response = await frontend.post(CHAT, {"model": MODEL, "messages": USER, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), response.text
        assert words in error["message"]


async def test_other_models_need_a_parser_for_the_choice_to_be_theirs() -> None:
    async with running_frontend(model="other") as frontend:
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice and --tool-call-parser") as caught:
            await frontend.openai.chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER])  # type: ignore[list-item]
        assert caught.value.param == "tool_choice"
        frontend.fake.script = frontend.server.serving.model.tokenizer.encode('{"city":"Rome"}')
        message, _ = await whole(frontend, tools=[WEATHER], tool_choice=NAMED)
        assert message["tool_calls"][0]["function"]["name"] == "weather"


async def test_allowed_tools_are_the_only_ones(frontend: Running, tokenizer: Tokenizer) -> None:
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    await whole(frontend, tools=[NOW, WEATHER], tool_choice=chosen, max_tokens=2)
    assert [tag["begin"] for tag in tag_of(frontend)["tags"]] == ['<tool_call>\n{"name": "weather", "arguments": ']
    prompt = prompt_of(frontend, tokenizer)
    assert '"weather"' in prompt
    assert '"now"' not in prompt


async def test_several_answers_are_parsed_each_for_itself(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    body: dict[str, Any] = {"tools": [WEATHER, NOW], "n": 2, "logprobs": True, "return_token_ids": True}
    answer = (await frontend.post(CHAT, {"messages": USER, **body})).json()
    for choice in answer["choices"]:
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "now"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(frontend.fake.script) + 1
    streams: dict[int, list[Any]] = {0: [], 1: []}
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in await frontend.events(CHAT, messages=USER, **body):
        if chunk != "[DONE]":
            [choice] = chunk["choices"]
            streams[choice["index"]] += (choice["logprobs"] or {}).get("content") or []
            token_ids[choice["index"]] += choice.get("token_ids", [])
    for choice in answer["choices"]:
        assert streams[choice["index"]] == choice["logprobs"]["content"]
        assert token_ids[choice["index"]] == choice["token_ids"]


async def test_a_batch_answers_every_conversation(frontend: Running, tokenizer: Tokenizer) -> None:
    messages = [USER, [{"role": "user", "content": "something longer"}]]
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 1, "n": 2, "ignore_eos": True}
    response = await frontend.post(f"{CHAT}/batch", {"messages": messages, **body})
    answer = response.json()
    assert response.status_code == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [(await frontend.post(CHAT, {"messages": one, **body})).json() for one in messages]
    texts = [choice["message"]["content"] for one in alone for choice in one["choices"]]
    assert [choice["message"]["content"] for choice in answer["choices"]] == texts
    assert answer["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    for wrong, param in (({"messages": []}, "messages"), ({"messages": messages, "stream": True}, "stream")):
        response = await frontend.post(f"{CHAT}/batch", wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_calls_and_their_results_are_in_the_prompt(frontend: Running, tokenizer: Tokenizer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": "Fine.", "tool_calls": []},
        {"role": "developer", "content": "Be brief."},
    ]
    await whole(frontend, messages=messages, tools=[WEATHER], max_tokens=2)
    prompt = prompt_of(frontend, tokenizer)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny" in prompt
    assert "<|im_start|>system\nBe brief." in prompt


async def test_reasoning_is_a_field_of_its_own(tokenizer: Tokenizer) -> None:
    async with running_frontend(reasoning_parser="deepseek_r1") as frontend:
        frontend.fake.script = tokenizer.encode(f"<think>\nHm, 🙂.\n</think>\n\n{CALLS}")
        message, finish_reason = await both(frontend, tools=[WEATHER, NOW])
        assert (message["reasoning"], message["content"], finish_reason) == (
            "\nHm, 🙂.\n",
            "\n\nI look.\n",
            "tool_calls",
        )
        hidden, _ = await both(frontend, tools=[WEATHER, NOW], include_reasoning=False)
        assert hidden == {**message, "reasoning": None}
        frontend.fake.script = tokenizer.encode("Hm.</think>Yes.")
        answer = (await frontend.post(CHAT, {"messages": USER})).json()
        assert answer["choices"][0]["message"]["content"] == "Yes."
        num_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_tokens < answer["usage"]["completion_tokens"]


async def test_the_end_of_the_prompt_says_whether_there_is_reasoning(tokenizer: Tokenizer) -> None:
    template = (
        "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort }}"
    )
    async with running_frontend(reasoning_parser="deepseek_r1", chat_template=template) as frontend:
        frontend.fake.script = tokenizer.encode("Yes.")
        thinking, _ = await both(frontend)
        assert (thinking["reasoning"], thinking["content"]) == ("Yes.", None)
        plain, _ = await both(frontend, chat_template_kwargs={"enable_thinking": False})
        assert (plain["reasoning"], plain["content"]) == (None, "Yes.")
        await whole(frontend, reasoning_effort="high")
        assert prompt_of(frontend, tokenizer) == "hihigh"
        await whole(frontend, reasoning_effort="none")
        assert prompt_of(frontend, tokenizer) == "hi<think></think>none"


@register_reasoning_parser("marked")
class MarkedReasoning(TaggedReasoningParser):
    """Ends with a special token of the embedded model."""

    start, end = "<|im_start|>", "<|pad|>"
    markers = (start, end)
    is_assumed = True


async def test_constraints_wait_for_the_token_that_ends_the_reasoning(tokenizer: Tokenizer) -> None:
    async with running_frontend(reasoning_parser="marked") as frontend:
        end = tokenizer.token_id("<|pad|>")
        thought, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("Hm, hm.", '{"a": 1}'))
        frontend.fake.script = [*thought, end, *answer]
        message, _ = await both(frontend, response_format={"type": "json_object"})
        assert (message["reasoning"], message["content"]) == ("Hm, hm.", '{"a": 1}')
        assert list(frontend.fake.submits[-1].sampling_params.structured_output.start_after_token_ids) == [end]
        await whole(frontend, tools=[WEATHER], tool_choice="required")
        assert list(frontend.fake.submits[-1].sampling_params.structured_output.start_after_token_ids) == [end]
        usage = (await frontend.post(CHAT, {"messages": USER})).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought) + 1


async def test_a_request_may_bring_a_template_where_it_is_trusted(tokenizer: Tokenizer) -> None:
    template = "{% for d in documents %}{{ d.text }};{% endfor %}{{ tools[0].function.name }}"
    async with running_frontend(trust_request_chat_template=True) as frontend:
        documents = [{"text": "one"}, {"text": "two"}]
        await whole(frontend, chat_template=template, documents=documents, tools=[WEATHER], max_tokens=1)
        assert prompt_of(frontend, tokenizer) == "one;two;weather"


LOOPS = "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4
GROWS = "{% set t = namespace(s='x' * 1000000) %}{% for a in range(99999) %}{% set t.s = t.s ~ t.s %}{% endfor %}"


@pytest.mark.parametrize("template", [LOOPS, GROWS, "{{ 'x' * 99999999999 }}"], ids=["loops", "grows", "long"])
async def test_a_template_that_takes_too_much_is_ended_and_others_are_rendered(template: str) -> None:
    async with running_frontend(trust_request_chat_template=True) as frontend:
        body = {"messages": USER, "max_tokens": 1}
        response = await frontend.post(CHAT, {**body, "chat_template": template}, timeout=240)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "chat_template"
        assert "takes too much time or memory" in error["message"]
        response = await frontend.post(CHAT, {**body, "chat_template": "{{ messages[0].content }}"}, timeout=240)
        assert response.status_code == 200, response.text


async def test_plugins_bring_parsers(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (tool_registry, reasoning_registry):  # what is registered here is not for the tests after
        monkeypatch.setattr(registry, "_PARSERS", dict(registry._PARSERS))
    tools, reasoning = tmp_path / "tools.py", tmp_path / "reasoning.py"
    tools.write_text(
        "from pagoda_frontend.tool_parsers import ToolParser, register_tool_parser\n"
        "@register_tool_parser('shout')\n"
        "class Shout(ToolParser):\n"
        "    def _advance(self, *, is_last):\n"
        "        if is_last and self._text.startswith('CALL '):\n"
        "            self._begin(self._read(len(self._text))[5:].strip())\n"
        "            self._argue('{}')\n"
        "        return False\n"
    )
    reasoning.write_text(
        "from pagoda_frontend.reasoning_parsers import TaggedReasoningParser, register_reasoning_parser\n"
        "@register_reasoning_parser('sharp')\n"
        "class Sharp(TaggedReasoningParser):\n"
        "    start, end = '##', '##'\n"
    )
    config: dict[str, Any] = {"tool_parser_plugin": str(tools), "reasoning_parser_plugin": str(reasoning)}
    async with running_frontend(
        **config, tool_call_parser="shout", enable_auto_tool_choice=True, reasoning_parser="sharp"
    ) as frontend:
        frontend.fake.script = tokenizer.encode("## Hm. ## CALL now")
        message, _ = await both(frontend, tools=[NOW])
        assert message == {
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [{"name": "now", "arguments": "{}"}],
        }
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    for path, words in ((broken, "nothing_of_this_name"), (tmp_path / "missing.py", "not a file")):
        with pytest.raises(ConfigError, match=words):
            async with running_frontend(tool_parser_plugin=str(path)):
                pass


async def test_reasoning_ends_at_a_special_token_that_no_text_shows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plugin = tmp_path / "reasoning.py"
    plugin.write_text(
        "from pagoda_frontend.reasoning_parsers import TaggedReasoningParser, register_reasoning_parser\n"
        "@register_reasoning_parser('special')\n"
        "class Special(TaggedReasoningParser):\n"
        "    start, end = '##', '<|im_start|>'\n"
        "    markers = (start, end)\n"
    )
    async with running_frontend(reasoning_parser_plugin=str(plugin), reasoning_parser="special") as frontend:
        frontend.fake.script = tokenizer.encode("## Hm.<|im_start|>So.")
        assert tokenizer.token_id("<|im_start|>") in frontend.fake.script
        message, _ = await both(frontend)
        assert (message["reasoning"], message["content"]) == ("Hm.", "So.")


async def test_an_unknown_parser_does_not_start() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        async with running_frontend(tool_call_parser="nonsense"):
            pass
