"""GBNF means what llama.cpp says it means."""

import pytest
from llguidance import LLMatcher

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar.lark import lark_of
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("pagoda-tiny")
COMPILER = GrammarCompiler(tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)


def takes(grammar: str, text: str) -> bool:
    matcher: LLMatcher = COMPILER.compile(StructuredOutputsParams(grammar=grammar))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return len(ids) == matcher.validate_tokens(ids) and all(map(matcher.consume_token, ids)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u3042"', "あ", "い"),
        (r'root ::= "\u00e9"', "é", "e"),
        (r'root ::= "\U0001F600"', "😀", "😁"),
        (r'root ::= "\x41\x22\x5c"', 'A"\\', "A"),
        (r'root ::= "a\n\t\r\"\\b"', 'a\n\t\r"\\b', "a"),
        (r"root ::= [\u00e9-\u00eb]+", "éêë", "è"),
        (r"root ::= [\U0001F600-\U0001F602]", "😁", "😅"),
        (r"root ::= [\x2d\x5d\x5e]+", "-]^", "a"),
        ("root ::= [a-]+", "a-", "b"),
        ("root ::= [-a]+", "a-", "b"),
        ("root ::= [+--]+", "+,-", "."),
        ("root ::= [&&a]+", "a&&", "b"),
        ("root ::= [~~/.]+", "~/.", "b"),
        ("root ::= [a[b]+", "a[b", "c"),
        (r"root ::= [\]\[\\]+", "][\\", "c"),
        (r"root ::= [^\n\"]+", "a b", "a\n"),
        ("root ::= [^a]", "\n", "a"),
        ("root ::= . .", "\na", "a"),
        ('root ::= "a"{2}', "aa", "aaa"),
        ('root ::= "a"{2,}', "aaaa", "a"),
        ('root ::= "a"{1,3} "b"', "aaab", "aaaab"),
        ('root ::= "a"{0,1} "b"?', "", "aa"),
        ('root ::= ("a" | "b"){2, 3}', "abb", "a"),
        ('root ::= "a" | # one " [ {\n  "b" # two\n', "b", "c"),
        ('root ::= "a"\n  | "b"\n  # not this\n  | "c"\nx ::= "d"', "c", "d"),
        ('root ::= (\n "a"\n | "b"\n)+', "abba", "c"),
        ('root ::=\n  "a" x\nx ::= "b" |', "a", "b"),
        ('root ::= "a" ::="b"'.replace(' ::="b"', ' "::=" "b"'), "a::=b", "ab"),
        ('root ::= start\nstart ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"', "123", "321"),
        ('root ::= "(" root ")" | ""', "(())", "(()"),
        ('root ::= root "a" | "b"', "baa", "ab"),
        ('# start: not Lark\nroot ::= "a"', "a", "b"),
        ('root ::= "start: x"', "start: x", "x"),
        (r'root ::= "\uD7FF\uE000"', "\ud7ff\ue000", "a"),
        (r'root ::= "\U0010FFFF"', "\U0010ffff", "a"),
        (r"root ::= [\x2d\]-a]+", "-]^_`a", "b"),
        ("root ::= [b-b]+", "bb", "a"),
        ("root ::= [a-c-e]+", "abc-e", "d"),
        ("root ::= [\x7f]", "\x7f", "a"),
    ],
)
def test_gbnf_takes_what_it_describes(grammar: str, right: str, wrong: str) -> None:
    assert takes(grammar, right)
    assert not takes(grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (r'root ::= "\q"', r"'\\q' is not an escape of GBNF"),
        (r'root ::= "a\u12"', r"'\\u12' is not an escape of GBNF"),
        (r'root ::= "\UFFFFFFFF"', r"'\\UFFFFFFFF' is not an escape of GBNF"),
        (r'root ::= "\U00110000"', r"'\\U00110000' is not an escape of GBNF"),
        (r'root ::= "\uD800"', r"'\\uD800' is not an escape of GBNF"),
        (r'root ::= "\uDFFF"', r"'\\uDFFF' is not an escape of GBNF"),
        (r'root ::= "\q and more"', r"'\\q and mor' is not an escape of GBNF"),
        ("root ::= [z-a]", "the range z-a is upside down"),
        ("root ::= other", "there is no rule 'other'"),
        ("root ::= a-b\na-c ::= root", "there is no rule 'a-b'"),
        ("root ::= " + "x" * 600, "there is no rule '" + "x" * 439),
    ],
)
def test_what_is_no_gbnf_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lark_of(grammar)
    assert caught.value.message == f"structured_outputs.grammar cannot be read: {message}"
    assert caught.value.field == "structured_outputs"
    assert len(caught.value.message) <= 500


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ("start: WORD\nWORD: /[a-z]+/", "abc", "A"),
        ('start: "a" | b\nb: "::="', "::=", "b"),
        (r'start: "\u00e9" "\n"', "é\n", "e"),
        ('start: ("a" "b"?)~2', "aba", "a"),
    ],
)
def test_lark_stays_lark(grammar: str, right: str, wrong: str) -> None:
    assert takes(grammar, right)
    assert not takes(grammar, wrong)
