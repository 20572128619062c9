"""Compiles StructuredOutputsParams to a matcher that says which tokens may come next, with llguidance for one
tokenizer.

The frontend compiles a constraint to refuse a bad one, the worker to enforce it. No torch, no gRPC.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.json_schema import with_ends, without_additional_properties
from pagoda_common.grammar.lark import lark_of, lark_regex
from pagoda_common.grammar.schema_logic import guaranteed
from pagoda_common.grammar.structural_tag import structural_tag_grammar
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

WHITESPACE = r" |\n[ \t]{0,20}"
"""Between the tokens of JSON: a space, or a new line with its indentation. Bounded, for a model that is not sure what
comes next likes to continue with white space forever."""
LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own bounds on the size of grammar, lexer and parser state, which keep a step at milliseconds."""
ESCAPES = 'nrbtf\\"'
"""After a backslash. Not u: "\\u0061" is the name "a", and llguidance would take it for another one."""
FIELD = "structured_outputs"
GUARD = "\x02"
"""Written before a text so that a tokenizer does not take it for the start of one."""
MAX_TOKEN_BYTES = 64
MAX_FORCED_BYTES = 8192
"""Of text that can only go on in one way. A mask walks all of it, at each token and for each sequence (0.2 us a byte,
1.5 us the first time), and a lexer keeps half a KiB for each byte: `a{1000000}` took 0.5 s and 130 MB."""
OPTIONS_KEY = "x-guidance"
"""Where llguidance looks for options in a schema, such as separators that JSON does not have: ours to say."""
ANNOTATION = "Unknown format: "
"""llguidance's warning for a `format` it does not know, which by JSON Schema is an annotation and no constraint."""


class GrammarCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, *, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Half a second for a large vocabulary.

        Args:
            vocab_size: columns of the model's logits.
            eos_token_ids: end tokens; they are never text, whatever the tokenizer says of them.
        """
        words = _Words(tokenizer, vocab_size, frozenset(eos_token_ids))
        self.end_id = words.eos_token_id
        """Bit in a mask that says that the output may end here; a token id that the model does not have."""
        self.num_bits = len(words.tokens)
        """Bits in a mask: more than vocab_size."""
        self._special_tokens = words.special_tokens
        self._tokenizer = LLTokenizer(TokenizerWrapper(words))

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an output.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or asks for what cannot be guaranteed.
        """
        if not isinstance(params.json, str):
            return self._compile(params, self._grammar(params))
        schema = json.loads(params.json)
        if params.disable_additional_properties:
            schema = without_additional_properties(schema)
        try:
            schema = guaranteed(schema)
        except InvalidRequest as error:
            raise _refuse(params, error.message) from None
        try:
            return self._compile(params, _json_grammar(with_ends(schema), params))
        except InvalidRequest:  # the ends may be what is too much of it
            return self._compile(params, _json_grammar(schema, params))

    def _compile(self, params: StructuredOutputsParams, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refuse(params, matcher.get_error())
        ignored = [text for text in matcher.get_grammar_warnings() if not text.startswith(ANNOTATION)]
        if ignored and params.grammar is None:
            raise _refuse(params, f"cannot be guaranteed: {'; '.join(ignored)}")
        return matcher

    def _grammar(self, params: StructuredOutputsParams) -> str:
        if params.json_object:
            return _json_grammar({"type": "object"}, params)
        if params.regex is not None:
            return LLMatcher.grammar_from_lark(f"start: {lark_regex(params.regex)}")
        if params.choice is not None:
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice)))
        if params.grammar is not None:
            return LLMatcher.grammar_from_lark(lark_of(params.grammar))
        assert isinstance(params.structural_tag, str)
        return structural_tag_grammar(
            params.structural_tag, special_tokens=self._special_tokens, json_options=json_options(params)
        )


def _json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    schema = {name: part for name, part in schema.items() if name != OPTIONS_KEY}
    options: Any = json_options(params)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as error:
        raise _refuse(params, str(error)) from error


class _Words:
    """A tokenizer as llguidance wants to see it, with one token more that stands for the end of the grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._encode = tokenizer.encode
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        special_ids = sorted(token_id for token_id in tokenizer.special_token_ids if token_id < num_tokens)
        self.tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(num_tokens)]
        self.special_tokens = {self.tokens[token_id].decode(errors="replace"): token_id for token_id in special_ids}
        self.tokens.append(b"<|end of grammar|>")
        self.eos_token_id = num_tokens
        self.bos_token_id = None
        self.special_token_ids = sorted({*special_ids, *(eos for eos in eos_token_ids if eos < num_tokens), num_tokens})

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell exactly `text`: what is forced by a grammar is sampled as the tokenizer would write it.

        Tokenizers that put a space before a text, or know no bytes, need help.
        """
        data = text.encode() if isinstance(text, str) else text
        text = data.decode(errors="replace")
        ids = self._encode(text, add_special_tokens=False)
        if self._spelling(ids) == data:
            return ids
        ids = self._encode(GUARD + text, add_special_tokens=False)
        for place in range(1, len(ids) + 1):
            if self._spelling(ids[:place]).endswith(GUARD.encode()) and self._spelling(ids[place:]) == data:
                return ids[place:]
        return self._longest_first(data)

    def _spelling(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[token_id] for token_id in ids)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {word: token_id for token_id, word in enumerate(self.tokens) if word and token_id not in special}

    def _longest_first(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            length = next(
                (n for n in range(min(MAX_TOKEN_BYTES, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0
            )
            if not length:
                break  # no token begins with this byte
            ids.append(self._ids[data[at : at + length]])
            at += length
        return ids


def forced_fault(matcher: LLMatcher) -> str | None:
    """What is wrong with text that may come next: too much of it is forced, or that is found to break a limit.

    To be asked before a mask, which it makes cheaper by what it takes.
    """
    num_bytes = len(matcher.compute_ff_bytes())
    if matcher.is_error():
        return f"the output cannot continue under {FIELD}: {matcher.get_error().strip()}"[:500]
    if num_bytes <= MAX_FORCED_BYTES:
        return None
    return f"{FIELD} forces {num_bytes} bytes of text at once, must be at most {MAX_FORCED_BYTES}"


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for JSON schemas."""
    options: dict[str, Any] = {"lenient": True, "coerce_one_of": False}  # lenient: to hear of all that it ignores
    options["json_allowed_escapes"] = ESCAPES
    if params.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": params.whitespace_pattern or WHITESPACE}


def _refuse(params: StructuredOutputsParams, message: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{params.kind}: {message.strip()}"[:500], field=FIELD)
