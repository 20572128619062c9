"""Constraints in the worker: masks follow the output, whatever the batch, the slot or the moment it enters."""

import json
import re
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from pagoda_common.errors import Code, InvalidRequest
from pagoda_common.grammar import bounded_grammar
from pagoda_common.grammar.matcher import GrammarCompiler, forced_fault
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask, apply_token_bitmask_reference
from pagoda_worker.sampling import grammars, structured
from tests.unit.worker.driver import Driver, Tracked

PROMPT = "Once upon a time"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver("pagoda-tiny", num_blocks=400)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def params(max_tokens: int = 100, *, start: tuple[int, ...] = (), temperature: float = 0.0, **kwargs: Any) -> Any:
    """Sampling parameters; constraints by their name, everything else as it is."""
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "disable_any_whitespace")
    constraint = {name: kwargs.pop(name) for name in names if name in kwargs}
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**constraint, start_after_token_ids=start),
        **kwargs,
    )


def cut(driver: Driver, tracked: Tracked) -> list[int]:
    """The output up to its end token, as the scheduler would end it."""
    ends = driver.facts.eos_token_ids
    place = next((place for place, token in enumerate(tracked.output) if token in ends), None)
    assert place is not None, "the output did not end"
    return tracked.output[:place]


def generate(driver: Driver, tokenizer: Tokenizer, each: list[SamplingParams], **options: Any) -> list[Tracked]:
    prompt = tokenizer.encode(PROMPT)
    return driver.generate([prompt] * len(each), each, max_tokens=each[0].max_tokens or 100, **options)


def texts(driver: Driver, tokenizer: Tokenizer, tracked: list[Tracked]) -> list[str]:
    return [tokenizer.decode(cut(driver, one)) for one in tracked]


def test_each_kind_of_constraint_is_obeyed_and_ends(driver: Driver, tokenizer: Tokenizer) -> None:
    tag = {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<n>"],
            "tags": [{"begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}],
            "at_least_one": True,
            "stop_after_first": True,
        }
    }
    each = [
        params(json=SCHEMA),
        params(regex="[a-c]{3}-[0-9]{4}"),
        params(choice=["yes", "no", "ma\u00efs oui"]),
        params(grammar='root ::= "(" [ab] ("," [ab]){3} ")"'),
        params(grammar='start: "<" N ">"\nN: /[0-9]{5}/'),
        params(structural_tag=tag),
        params(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, temperature=1.5, seed=1),
        params(
            json={"type": "integer", "minimum": 0, "maximum": 999}, disable_any_whitespace=True, logit_bias={5: 50.0}
        ),
    ]
    answers = texts(driver, tokenizer, generate(driver, tokenizer, each))
    value = json.loads(answers[0])
    assert set(value) == {"name", "age", "kind"}
    assert 0 <= value["age"] <= 120
    patterns = (r"[a-c]{3}-\d{4}", "yes|no|maïs oui", r"\([ab](,[ab]){3}\)", r"<\d{5}>", r"<n>\d\d</n>")
    for pattern, answer in zip(patterns, answers[1:6], strict=True):
        assert re.fullmatch(pattern, answer), answer
    assert all(isinstance(item, bool) for item in json.loads(answers[6]))
    assert isinstance(json.loads(answers[7]), int)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_taken_up_after_any_token_goes_on_the_same(
    driver: Driver, tokenizer: Tokenizer, temperature: float
) -> None:
    whole = params(json=SCHEMA, temperature=temperature, seed=7)
    [reference] = generate(driver, tokenizer, [whole])
    output = cut(driver, reference)
    assert len(output) > 8
    # All prefixes at once, in slots that held other sequences before.
    prefixes = [output[:size] for size in range(len(output) + 1)]
    resumed = generate(driver, tokenizer, [whole] * len(prefixes), outputs=prefixes)
    assert {tuple(cut(driver, one)) for one in resumed} == {tuple(output)}


def test_constrained_and_free_rows_do_not_touch_each_other(driver: Driver, tokenizer: Tokenizer) -> None:
    free = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40) for seed in range(3)]
    bound = [params(40, regex="[xyz]{5}", temperature=0.8, seed=seed) for seed in range(3)]
    mixed = [one for pair in zip(free, bound, strict=True) for one in pair]
    together = [one.output for one in generate(driver, tokenizer, mixed)]
    alone = [generate(driver, tokenizer, [one])[0].output for one in mixed]
    assert together == alone


def test_log_probabilities_are_those_of_the_model(driver: Driver, tokenizer: Tokenizer) -> None:
    free, bound = generate(
        driver,
        tokenizer,
        [SamplingParams(temperature=0, max_tokens=8, logprobs=2), params(8, regex="[A-Z]{8}", logprobs=2)],
    )
    assert free.logprobs[0].items() >= {k: v for k, v in bound.logprobs[0].items() if k in free.logprobs[0]}.items()
    assert bound.ranks[0] > 1


def test_the_constraint_begins_after_the_start_tokens(driver: Driver, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    [free] = driver.generate([prompt], SamplingParams(temperature=0, max_tokens=12), max_tokens=12)
    run = tuple(free.output[4:6])
    assert free.output.index(run[0]) == 4, "the run must not occur earlier"
    one = params(60, regex="[0-9]{6}", start=run)
    [tracked] = generate(driver, tokenizer, [one])
    output = cut(driver, tracked)
    assert output[:6] == free.output[:6]
    assert tokenizer.decode(output[6:]).isdecimal()
    resumed = generate(driver, tokenizer, [one] * len(output), outputs=[output[:size] for size in range(len(output))])
    assert all(cut(driver, again) == output for again in resumed)


def test_before_the_start_tokens_the_output_cannot_end(driver: Driver, tokenizer: Tokenizer) -> None:
    one = params(20, choice=["a"], start=(1, 1, 1), logit_bias=dict.fromkeys(driver.facts.eos_token_ids, 100.0))
    [tracked] = generate(driver, tokenizer, [one])
    assert not set(tracked.output) & set(driver.facts.eos_token_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"json": {"type": "array", "uniqueItems": True}}, "cannot be guaranteed"),
        ({"choice": ["yes"], "allowed_token_ids": [5]}, "leave no token"),
        ({"choice": ["yes"], "min_tokens": 30}, "leave no token"),
    ],
)
def test_a_constraint_that_cannot_be_met_fails_its_own_request(
    driver: Driver, tokenizer: Tokenizer, options: dict[str, Any], message: str
) -> None:
    bad, good = generate(driver, tokenizer, [params(40, **options), params(40, choice=["yes"])])
    assert bad.bad is not None
    assert bad.bad.code is Code.INVALID_ARGUMENT
    assert message in bad.bad.message
    assert texts(driver, tokenizer, [good]) == ["yes"]


def test_ignored_ends_still_end_the_grammar(driver: Driver, tokenizer: Tokenizer) -> None:
    [tracked] = generate(driver, tokenizer, [params(12, choice=["no"], ignore_eos=True)])
    output = cut(driver, tracked)
    assert tokenizer.decode(output) == "no"
    assert len(tracked.output) == 12
    assert set(tracked.output[len(output) :]) <= set(driver.facts.eos_token_ids)


def test_stop_tokens_are_ends_where_the_grammar_may_end(driver: Driver, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("!")[0]
    likes_it = {stop: 100.0}
    [tracked] = generate(driver, tokenizer, [params(30, regex="[0-9]{3}", stop_token_ids=[stop], logit_bias=likes_it)])
    place = tracked.output.index(stop)
    assert tokenizer.decode(tracked.output[:place]).isdecimal()


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 300, 1000])
def test_the_bitmask_is_applied_as_the_reference_does(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    bits = torch.from_numpy(generator.integers(0, 256, (5, vocab_size // 8 + 4), dtype=np.uint8))
    logits = torch.from_numpy(generator.normal(size=(5, vocab_size)).astype(np.float32))
    logits[2, vocab_size // 2] = torch.nan
    got, wanted = apply_token_bitmask(logits, bits), apply_token_bitmask_reference(logits, bits)
    assert torch.equal(got.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    with pytest.raises(ValueError, match="bit for each token"):
        apply_token_bitmask(torch.zeros(5, 8 * bits.shape[1] + 1), bits)


def deep_chain(depth: int) -> dict[str, Any]:
    """A schema whose compilation is as deep as its chain of references."""
    links: dict[str, Any] = {
        f"d{place}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{place + 1}"}}}
        for place in range(depth)
    }
    return {"$defs": {**links, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def test_a_constraint_that_would_break_the_worker_fails_alone(
    driver: Driver, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_grammar, "COMPILE_S", 2.0)
    each = [params(json=deep_chain(3500)), params(choice=["yes"])]
    bad, good = generate(driver, tokenizer, each)
    assert bad.bad is not None
    assert bad.bad.code is Code.INVALID_ARGUMENT
    assert "too complex" in bad.bad.message
    assert texts(driver, tokenizer, [good]) == ["yes"]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"regex": "a{1000000}"}, r"forces \d{6} bytes of text at once, must be at most 8192"),
        ({"regex": "(?:[cd]a|b)c{9000}"}, r"forces 9000 bytes|lexer error: too many expressions"),
        ({"json": {"const": "a" * 9000}}, r"forces 900\d bytes of text at once, must be at most 8192"),
        (
            {"json": {"type": "string", "pattern": "^a*$", "minLength": 9000}},
            r"forces 90\d\d bytes|too many expressions",
        ),
        ({"regex": "((a{99}){99}){99}"}, r"forces \d{6} bytes of text at once, must be at most 8192"),
    ],
    ids=["at once", "later", "const", "two bounds", "nested"],
)
def test_a_constraint_that_forces_much_text_fails_before_it_costs_much(
    driver: Driver,
    tokenizer: Tokenizer,
    constraint: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[str] = []

    def ask(matcher: LLMatcher) -> str | None:
        fault = forced_fault(matcher)
        refused.extend([fault] if fault and "forces" in fault else [])  # a lexer that has failed costs nothing
        return fault

    monkeypatch.setattr(structured, "forced_fault", ask)
    each = [params(40, **constraint), params(40, **constraint), params(40, choice=["yes"])]
    *bad, good = generate(driver, tokenizer, each)
    for one in bad:
        assert one.bad is not None
        assert one.bad.code is Code.INVALID_ARGUMENT
        assert re.search(message, one.bad.message)
        assert len(one.output) < 5
    assert texts(driver, tokenizer, [good]) == ["yes"]
    assert len(refused) <= 1, "the second sequence of the constraint was walked as well"


def test_text_up_to_the_bound_may_be_forced(driver: Driver, tokenizer: Tokenizer) -> None:
    [tracked] = generate(driver, tokenizer, [params(8, regex="x{8000}")])
    assert tracked.bad is None
    assert set(tokenizer.decode(tracked.output)) == {"x"}


class Compiler:
    """Compiles at once."""

    def compile(self, constraint: StructuredOutputsParams) -> str:
        return f"matcher of {constraint.regex}"


def test_the_constraints_that_were_asked_for_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    kept = grammars.Grammars(Compiler)  # type: ignore[arg-type]
    kept._is_loaded.set()
    often, seldom, new = (StructuredOutputsParams(regex=regex) for regex in ("often", "seldom", "new"))
    templates = [kept.template(one) for one in (often, seldom, often, new)]
    assert templates[0] is templates[2] is kept.template(often)
    assert templates[3] is kept.template(new)
    assert templates[1] is not kept.template(seldom)


@pytest.mark.parametrize(
    "other",
    [
        {"json": {"type": "boolean"}},
        {"json": None, "regex": '{"type": "integer"}'},
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
        {"whitespace_pattern": "[ ]?"},
    ],
    ids=lambda options: " ".join(options),
)
def test_constraints_that_differ_in_one_option_are_compiled_each(other: dict[str, Any]) -> None:
    options: dict[str, Any] = {"json": {"type": "integer"}}
    kept = grammars.Grammars(Compiler)  # type: ignore[arg-type]
    first = kept.template(StructuredOutputsParams(**options))
    assert kept.template(StructuredOutputsParams(**options)) is first
    assert kept.template(StructuredOutputsParams(**options | other)) is not first


def test_a_constraint_that_takes_for_ever_fails_alone(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 0.2)
    is_over = Event()

    class Slow:
        compiler = GrammarCompiler(tokenizer=tokenizer, vocab_size=3072)

        def compile(self, constraint: StructuredOutputsParams) -> LLMatcher:
            if constraint.regex == "slow":
                is_over.wait()
            return self.compiler.compile(constraint)

    kept = grammars.Grammars(Slow)  # type: ignore[arg-type]
    next_one = StructuredOutputsParams(regex="[0-9]")
    kept.template(StructuredOutputsParams(regex="slow"))
    kept.template(next_one)
    try:
        with pytest.raises(InvalidRequest, match="too complex"):
            kept.matcher(StructuredOutputsParams(regex="slow"))
        assert not kept.matcher(next_one).is_error()
    finally:
        is_over.set()


def test_what_is_kept_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 5000)
    kept = grammars.Grammars(Compiler)  # type: ignore[arg-type]
    constraints = [StructuredOutputsParams(regex=letter * 2000) for letter in "abcd"]
    templates = [kept.template(one) for one in constraints]
    assert kept.template(constraints[3]) is templates[3]
    assert kept.template(constraints[2]) is templates[2]
    assert kept.template(constraints[0]) is not templates[0]


def test_what_is_compiled_and_not_held_is_forgotten_at_rest(tokenizer: Tokenizer) -> None:
    kept = grammars.Grammars(
        lambda: grammars.load_compiler(
            "pagoda-tiny", revision=None, vocab_size=tokenizer.vocab_size, eos_token_ids=(0,)
        )
    )
    assert not kept.forget()
    held, other = (StructuredOutputsParams(regex=letter * 20) for letter in "ab")
    with kept.held(held):
        templates = [kept.template(one) for one in (held, other)]
        for template in templates:
            template.result(240)
        assert kept.forget()
        assert not kept.forget()
        assert kept.template(held) is templates[0]
        assert kept.template(other) is not templates[1]
    kept.template(held).result(240)
    kept.template(other).result(240)
    assert kept.forget()
    assert not kept._templates
    assert not kept._sizes
