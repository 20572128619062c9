"""From what clients write to prompts: bounds on both sides, what templates get, and answers of helper processes."""

import asyncio
import sys
from typing import Any, ClassVar, cast

import orjson
import pytest

from pagoda_common.errors import InvalidRequest, NotReady, RequestTooLong
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.params.truncation import Truncation
from pagoda_frontend.budget.helpers import JobFailed
from pagoda_frontend.budget.work_pool import LIGHT_BYTES, WorkPool
from pagoda_frontend.openai.protocol import ChatMessage, Tool
from pagoda_frontend.pooling import texts as pooling_texts
from pagoda_frontend.pooling.texts import _parts, maker_of, pooling_prompts, truncation_for
from pagoda_frontend.requests import grammar_checks
from pagoda_frontend.requests.encoding import TextEncoder
from pagoda_frontend.requests.grammar_checks import GrammarChecks
from pagoda_frontend.requests.prompts import Prompts, template_message
from pagoda_frontend.requests.template_helpers import TemplateHelpers


class Letters:
    """A token is a letter."""

    special_tokens: ClassVar = {"bos_token": "<s>"}
    chat_template = "own 'query' \"document\""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([0] if add_special_tokens else []), *(ord(letter) % 100 for letter in text)]

    def choose_template(self, chat_template: str | None, *, has_tools: bool) -> str:
        return f"{chat_template or 'checkpoint'}{' with tools' if has_tools else ''}"


def prompts(**fields: Any) -> Prompts:
    given = {"tokenizer": cast("Any", Letters()), "chat_template": None, "max_model_len": 10, "vocab_size": 100}
    return Prompts(**given | fields)  # type: ignore[arg-type]  # of several types


def message(**fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", "content": "hi"} | fields)


def test_token_ids_fit_the_context_and_the_vocabulary() -> None:
    assert prompts().from_token_ids([99] * 9, field="prompt") == [99] * 9
    with pytest.raises(RequestTooLong) as caught:
        prompts().from_token_ids([99] * 10, field="prompt")
    assert str(caught.value) == (
        "This model's maximum context length is 10 tokens, but the prompt has 10 tokens and at least one must be left "
        "for the output."
    )
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest) as refused:
        prompts().from_token_ids([100], field="prompt")
    assert refused.value.field == "prompt"
    cut = prompts().from_token_ids([100, *range(9)], field="prompt", truncation=Truncation(num_tokens=9))
    assert cut == list(range(9))


def test_lengths_in_characters_have_bounds() -> None:
    context = 2000
    encoder = TextEncoder(tokenizer=cast("Any", None), work=cast("Any", None), max_model_len=context)
    encoder.check_length(128 * context - 1, field="prompt")
    with pytest.raises(RequestTooLong, match="has at least 2000 tokens"):
        encoder.check_length(128 * context, field="prompt")
    longer = TextEncoder(
        tokenizer=cast("Any", None), work=cast("Any", None), max_model_len=context, longest_token_chars=129
    )
    longer.check_length(129 * context - 1, field="prompt")
    with pytest.raises(RequestTooLong):
        longer.check_length(129 * context, field="prompt")
    shorter = TextEncoder(
        tokenizer=cast("Any", None), work=cast("Any", None), max_model_len=context, longest_token_chars=5
    )
    shorter.check_length(128 * context - 1, field="prompt")
    small = TextEncoder(tokenizer=cast("Any", None), work=cast("Any", None), max_model_len=2)
    small.check_length(64 * 1024, field="prompt")
    with pytest.raises(RequestTooLong):
        small.check_length(64 * 1024 + 1, field="prompt")
    small.check_counted(1024**2, "prompt")
    with pytest.raises(InvalidRequest) as caught:
        small.check_counted(1024**2 + 1, "prompt")
    told = "prompt must have at most 1048576 characters, got 1048577"
    assert (str(caught.value), caught.value.field) == (told, "prompt")
    large = TextEncoder(tokenizer=cast("Any", None), work=cast("Any", None), max_model_len=200_000)
    large.check_counted(1_600_000, "prompt")
    with pytest.raises(InvalidRequest, match="at most 1600000 characters"):
        large.check_counted(1_600_001, "prompt")
    both = prompts()
    both.check_length(1024**2, field="x", is_cut=True)
    with pytest.raises(RequestTooLong):
        both.check_length(1024**2, field="x", is_cut=False)


def test_which_template_a_conversation_gets() -> None:
    assert prompts().template(None, tools=None) == "checkpoint"
    assert prompts(chat_template="server").template(None, tools=None) == "server"
    assert prompts(chat_template="server").template("request", tools=[cast("Any", object())]) == "request with tools"
    assert prompts().score_template == Letters.chat_template
    assert prompts(chat_template="no roles").score_template is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages is empty: there must be at least one message"),
        *(
            ({"chat_template_kwargs": {name: None}}, f"chat_template_kwargs must not contain {name}")
            for name in (
                *("messages", "chat_template", "tools", "documents", "add_generation_prompt"),
                "continue_final_message",
            )
        ),
        (
            {"continue_final_message": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        ),
        (
            {"messages": [message(), message(role="robot")]},
            "messages.1.role is 'robot', must be one of system, developer, user, assistant, tool, or one that the chat "
            "template writes",
        ),
    ],
)
async def test_conversations_that_are_none(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await prompts(chat_template="{{ 1 }}").render(**{"messages": [message()]} | fields)
    field = next((name for name in fields if name != "messages"), "messages")
    assert (str(caught.value), caught.value.field) == (told, field)


async def test_a_template_that_refuses_says_why() -> None:
    for source, told in (("{{ raise_exception('no system') }}", "no system"), ("{{ 1 + 'a' }}", "unsupported operand")):
        with pytest.raises(InvalidRequest, match=f"the chat template refused the messages: .*{told}") as caught:
            await prompts(chat_template=source, work=WorkPool()).render([message()])
        assert caught.value.field == "messages"


async def test_what_a_template_gets() -> None:
    source = (
        "{{ bos_token }}|{{ add_generation_prompt }}|{{ documents }}|{{ tools }}|{{ mood }}|{{ messages | length }}"
    )

    class Tokenizer(Letters):
        def choose_template(self, chat_template: str | None, *, has_tools: bool) -> str:
            return str(chat_template)

    made = prompts(chat_template=source, tokenizer=cast("Any", Tokenizer()))
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    text = await made.render([message()], chat_template_kwargs={"mood": "glad"}, tools=[tool], documents=[{"a": 1}])
    shown = "[{'type': 'function', 'function': {'name': 'f'}}]"
    assert text == f"<s>|True|[{{'a': 1}}]|{shown}|glad|1"
    assert await made.render([message()], add_generation_prompt=False) == "<s>|False|None|None||1"
    ids = await made.from_messages([message()], add_generation_prompt=False, truncation=Truncation(num_tokens=2))
    assert ids == [ord(letter) % 100 for letter in "|1"]


def test_what_of_a_message_a_template_gets() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    whole = message(
        role="assistant",
        content=None,
        tool_calls=[call, {"type": "function", "function": {"name": "g", "arguments": ""}}],
        reasoning="r",
        name="n",
        tool_call_id="t",
        other=5,
        nothing=None,
    )
    assert template_message(whole, 0) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"type": "function", "function": {"name": "g", "arguments": {}}},
        ],
        "reasoning": "r",
        "reasoning_content": "r",
        "name": "n",
        "tool_call_id": "t",
        "other": 5,
    }
    broken = {"function": {"name": "f", "arguments": "{"}}
    (shown,) = template_message(message(role="assistant", tool_calls=[broken]), 0)["tool_calls"]
    assert shown["function"]["arguments"] == "{"
    parts = message(content=[{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}])
    assert template_message(parts, 0)["content"] == "a\nb"
    other_name = message(role="assistant", reasoning_content="r")
    assert template_message(other_name, 0)["reasoning"] == "r"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"content": None}, "messages.3.content: a user message needs content"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages.3.content.1: parts of type 'image_url' are not supported yet",
        ),
        ({"content": [{"type": "refusal", "text": "a"}]}, "messages.3.content.0.refusal: field required"),
        ({"content": [{"type": "text"}]}, "messages.3.content.0.text: field required"),
    ],
)
def test_a_content_that_is_no_text(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_message(message(**fields), 3)
    assert (str(caught.value), caught.value.field) == (told, "messages")


# Helper processes.


class Pool:
    """Returns fixed answers and records the questions."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []
        self.is_closed = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, line: bytes) -> bytes:
        self.asked.append(orjson.loads(line))
        await self.may_answer.wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    async def close(self) -> None:
        self.is_closed = True


async def test_a_template_of_a_request_is_rendered_elsewhere() -> None:
    work = WorkPool()
    helpers = TemplateHelpers(work=work)
    assert helpers._helpers.command == [sys.executable, "-m", "pagoda_common.text.template_process"]
    assert helpers._helpers.max_job_s == 10.0
    broken = [JobFailed(), b"no json"]
    helpers._helpers = pool = cast("Any", Pool(b'{"text": "t"}', b'{"error": "e", "field": "f"}', *broken))
    assert await helpers.render({"source": "a"}) == "t"
    assert pool.asked == [{"source": "a"}]
    with pytest.raises(InvalidRequest) as caught:
        await helpers.render({})
    assert (str(caught.value), caught.value.field) == ("e", "f")
    for _ in broken:
        with pytest.raises(InvalidRequest) as caught:
            await helpers.render({})
        told = "chat_template takes too much time or memory to be rendered"
        assert (str(caught.value), caught.value.field) == (told, "chat_template")
    await helpers.close()
    assert pool.is_closed
    work.close()


def checks(*answers: Any) -> tuple[GrammarChecks, Pool]:
    made = GrammarChecks(tokenizer="t", revision=None, vocab_size=7, eos_token_ids=(1, 2))
    made.helpers = pool = cast("Any", Pool(*answers))
    return made, pool


FINE, WRONG = b'{"error": null}', b'{"error": "structured_outputs.regex: no"}'


async def test_what_process_compiles_constraints() -> None:
    made = GrammarChecks(tokenizer="t", revision="r", vocab_size=7, eos_token_ids=(1, 2))
    assert made.helpers.command[1:] == ["-m", "pagoda_common.grammar.grammar_process", "t", "r", "7", "1,2"]
    assert made.helpers.max_job_s == 20.0
    plain = GrammarChecks(tokenizer="t", revision=None, vocab_size=7)
    assert plain.helpers.command[-3:] == ["", "7", ""]


async def test_a_constraint_is_asked_for_once_whatever_goes_before_it() -> None:
    made, pool = checks(FINE, WRONG)
    await made.check(None)
    assert pool.asked == []
    for start in ((), (1, 2)):
        await made.check(StructuredOutputsParams(regex="a", start_after_token_ids=start))
    assert len(pool.asked) == 1
    (asked,) = pool.asked
    assert (asked["params"]["regex"], asked["params"]["start_after_token_ids"]) == ("a", [])
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await made.check(StructuredOutputsParams(regex="b"), field="guided_regex")
        assert caught.value.field == "guided_regex"
        assert "no" in str(caught.value)
    assert len(pool.asked) == 2
    await made.close()
    assert pool.is_closed


@pytest.mark.parametrize("answer", [JobFailed(), b"no json"])
async def test_a_constraint_that_breaks_the_process_is_too_complex(answer: Any) -> None:
    made, _ = checks(answer)
    with pytest.raises(InvalidRequest) as caught:
        await made.check(StructuredOutputsParams(regex="a"))
    told = "structured_outputs is too complex to be compiled"
    assert (str(caught.value), caught.value.field) == (told, "structured_outputs")


async def test_the_latest_answers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_KNOWN", 2)
    made, pool = checks(*[FINE] * 9)

    async def check(*patterns: str) -> int:
        for pattern in patterns:
            await made.check(StructuredOutputsParams(regex=pattern))
        return len(pool.asked)

    assert await check("a", "b", "a") == 2
    assert await check("c") == 3
    assert await check("a") == 3, "used after b"
    assert await check("b") == 4


async def test_two_that_ask_the_same_wait_for_one_answer() -> None:
    made, pool = checks(FINE)
    pool.may_answer.clear()
    asking = [asyncio.create_task(made.check(StructuredOutputsParams(regex="a"))) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    asking[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    pool.may_answer.set()
    await asyncio.gather(*asking[1:])
    assert len(pool.asked) == 1
    assert made._running == {}


async def test_closing_ends_what_is_asked() -> None:
    made, pool = checks(FINE)
    pool.may_answer.clear()
    asking = asyncio.create_task(made.check(StructuredOutputsParams(regex="a")))
    for _ in range(5):
        await asyncio.sleep(0)
    await made.close()
    with pytest.raises(NotReady) as caught:
        await asking
    assert str(caught.value) == "structured outputs are not checked any more: the server is shutting down"
    assert caught.value.retry_after_s == 1


# Texts that are pooled.


class Model:
    """What makers of prompts ask of a model."""

    max_model_len, vocab_size, only_pools = 10, 100, False
    tokenizer = cast("Any", Letters())

    def __init__(self) -> None:
        self.checked: list[Any] = []
        self.prompts = self
        self.score_template = "s"

    def check_length(self, num_chars: int, *, field: str, is_cut: bool) -> None:
        self.checked.append((num_chars, field, is_cut))


def test_a_maker_knows_its_model() -> None:
    model = Model()
    maker = maker_of(cast("Any", model), field="input")
    shown = (maker.max_model_len, maker.vocab_size, maker.field, maker.template)
    assert shown == (10, 100, "input", "s")
    assert (maker.add_special_tokens, maker.truncation, maker.prefix) == (True, None, "")
    assert (maker.max_document_tokens, maker.splits_long) == (0, False)
    cut = Truncation(num_tokens=3)
    other = maker_of(
        cast("Any", model),
        field="texts",
        add_special_tokens=False,
        truncation=cut,
        prefix="p",
        max_document_tokens=4,
        splits_long=True,
    )
    assert (other.add_special_tokens, other.truncation, other.prefix) == (False, cut, "p")
    assert (other.max_document_tokens, other.splits_long) == (4, True)
    assert other.check_length is not None
    other.check_length(5, True)
    assert model.checked == [(5, "texts", True)]


class Body:
    """What says how inputs are cut."""

    def __init__(self, num: int | None, side: Any = None) -> None:
        self.truncate_prompt_tokens, self.truncation_side = num, side


@pytest.mark.parametrize(
    ("num", "side", "only_pools", "cut"),
    [
        (None, None, True, None),
        (3, None, True, Truncation(num_tokens=3, side="right")),
        (3, None, False, Truncation(num_tokens=3, side="left")),
        (3, "left", True, Truncation(num_tokens=3, side="left")),
        (3, "right", False, Truncation(num_tokens=3, side="right")),
        (-1, None, False, Truncation(num_tokens=10, side="left")),
        (10, None, False, Truncation(num_tokens=10, side="left")),
    ],
)
def test_how_inputs_are_cut(num: int | None, side: Any, only_pools: bool, cut: Truncation | None) -> None:
    model = cast("Any", Model())
    model.only_pools = only_pools
    assert truncation_for(Body(num, side), model) == cut


def test_a_thread_takes_runs_of_inputs() -> None:
    assert _parts([]) == []
    large = "x" * LIGHT_BYTES
    assert _parts([large, "a", ("b", "c")]) == [[large], ["a", ("b", "c")]]
    half = "x" * (LIGHT_BYTES // 2)
    assert _parts([half, half, "a"]) == [[half, half], ["a"]]
    assert [len(part) for part in _parts(["a"] * 1025)] == [1024, 1]
    pair = (half, half)
    assert _parts([pair, "a"]) == [[pair], ["a"]]


async def test_how_many_inputs_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Maker:
        field = "input"

        def make_all(self, given: list[Any]) -> list[Any]:
            return [type("Prompt", (), {"pieces": [1] * len(one)}) for one in given]

    class Serving:
        work = WorkPool()

    async def made(*given: Any) -> int:
        return len(await pooling_prompts(list(given), cast("Any", Maker()), serving=cast("Any", Serving)))

    monkeypatch.setattr(pooling_texts, "MAX_INPUTS", 2)
    assert await made("a", "b") == 2
    assert await made("ab") == 1
    for given, told in (
        ((), "input is empty: it must have at least one entry"),
        (("a", "b", "c"), "there may be at most 2 inputs, got 3"),
        (("a", ""), "input.1 is empty: it must have at least one token"),
        (([],), "input is empty: it must have at least one token"),
        (("ab", "c"), "input makes 3 pieces of the model's length, there may be at most 2"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await made(*given)
        assert (str(caught.value), caught.value.field) == (told, "input")
    Serving.work.close()
