"""Parts of what makes tokens of texts, each alone: cuts, pieces, prompts, templates, messages word by word."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import ConfigError, InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Truncation
from pagoda_common.text import bad_words as bad_words_module
from pagoda_common.text.bad_words import bad_words_token_ids
from pagoda_common.text.chat_template import check_template, has_role, load_chat_template, render_chat_template
from pagoda_common.text.pooling_prompts import PoolingPrompt, PromptMaker, mean_of, pairs_of, score_template
from pagoda_common.text.prompt_files import PromptFiles
from pagoda_common.text.stop_strings import StopStrings
from pagoda_common.text.tokenizer import Tokenizer, _longest_first
from pagoda_common.text.vocabulary import BYTE_OF_CHARACTER
from tests.encoders import CLS, SEP, write_pair_tokenizer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("letters")
    write_pair_tokenizer(directory)
    return Tokenizer.load(str(directory))


@pytest.fixture
def maker(letters: Tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer=letters, max_model_len=12, vocab_size=letters.vocab_size, field="input")


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [
        (3, 4, 7, (3, 4)),
        (3, 5, 7, (3, 4)),
        (5, 3, 7, (4, 3)),
        (2, 9, 7, (2, 5)),
        (9, 2, 7, (5, 2)),
        (5, 5, 7, (3, 4)),
        (6, 5, 7, (4, 3)),
        (5, 5, 8, (4, 4)),
        (4, 0, 3, (3, 0)),
        (0, 4, 3, (0, 3)),
        (4, 4, 0, (0, 0)),
        (4, 4, 1, (0, 1)),
    ],
)
def test_the_longer_of_two_texts_is_cut_first(first: int, second: int, room: int, kept: tuple[int, int]) -> None:
    assert _longest_first(first, second, room) == kept


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """With what stands around it: [ and ] for the special tokens."""
    return "".join({CLS: "[", SEP: "]"}.get(one) or tokenizer.decode([one]) for one in ids)


@pytest.mark.parametrize(
    ("pair", "max_tokens", "side", "special", "text", "second"),
    [
        (None, None, "right", True, "[abcd]", 0),
        (None, None, "right", False, "abcd", 0),
        (None, 5, "right", True, "[abc]", 0),
        (None, 5, "left", True, "[bcd]", 0),
        (None, 3, "left", False, "bcd", 0),
        (None, 2, "right", True, "[]", 0),
        (None, 1, "right", True, "[]", 0),
        ("xy", None, "right", True, "[abcd]xy]", 6),
        ("xy", 8, "right", True, "[abc]xy]", 5),
        ("xy", 8, "left", True, "[bcd]xy]", 5),
        ("xyz", 8, "right", True, "[abc]xy]", 5),
        ("xyzuvw", 9, "left", True, "[bcd]uvw]", 5),
    ],
)
def test_a_text_is_cut_within_its_special_tokens(
    letters: Tokenizer, pair: str | None, max_tokens: int | None, side: Any, special: bool, text: str, second: int
) -> None:
    ids, start = letters.encode_within("abcd", pair=pair, max_tokens=max_tokens, side=side, add_special_tokens=special)
    assert (text_of(letters, ids), start) == (text, second)


def test_a_long_text_comes_in_pieces(letters: Tokenizer) -> None:
    pieces = letters.encode_pieces("abcdefgh", max_tokens=5)
    assert [text_of(letters, one) for one in pieces] == ["[abc]", "[def]", "[gh]"]
    bare = letters.encode_pieces("abcdefgh", max_tokens=5, add_special_tokens=False)
    assert [text_of(letters, one) for one in bare] == ["abcde", "fgh"]
    assert [text_of(letters, one) for one in letters.encode_pieces("ab", max_tokens=3)] == ["[a]", "[b]"]
    with pytest.raises(ValueError, match="max_tokens is 2, too few for the special tokens alone"):
        letters.encode_pieces("ab", max_tokens=2)


def test_what_a_cut_keeps(letters: Tokenizer, tiny: Tokenizer) -> None:
    assert [letters.cut("abc", number) for number in (1, 2, 3, 4)] == ["a", "ab", "abc", "abc"]
    text = "Hello 👋 world"
    whole = tiny.encode(text, add_special_tokens=False)
    assert tiny.cut(text, len(whole)) == text
    assert text.startswith(tiny.cut(text, 2))


def test_long_and_short_texts_are_read_alike(tiny: Tokenizer) -> None:
    """On both sides of where the library is asked otherwise."""
    for number in (511, 512, 513):
        text = ("ab c" * 200)[:number]
        (batched,) = tiny.encode_batch([text])
        assert tiny.encode(text) == batched
        assert tiny.encode(text, add_special_tokens=False) == tiny.encode_batch([text], add_special_tokens=False)[0]
    for number in (255, 256, 257):
        ids = [0, *tiny.encode("ab c" * 400)][:number]
        assert tiny.decode(ids, skip_special_tokens=False).startswith("<|endoftext|>ab c")
        assert tiny.decode(ids).startswith("ab c")


def test_what_a_tokenizer_says_of_a_token(tiny: Tokenizer) -> None:
    space = tiny.encode(" the", add_special_tokens=False)[0]
    assert tiny.token_piece(space) == tiny.token(space) == "Ġthe"
    assert tiny.token_id("Ġthe") == space
    assert tiny.token_bytes(space) == b" the"
    assert tiny.token_text(space) == " the"
    assert (tiny.token(99_999), tiny.token_piece(99_999), tiny.token_text(99_999)) == (None, "", "")
    assert tiny.token_id("no such token") is None
    assert tiny.get_vocab()["<|im_start|>"] == 1
    assert len(tiny.get_vocab()) == 3072
    assert {0, 1, 2} <= tiny.special_token_ids
    assert space not in tiny.special_token_ids
    longest = max(len(tiny.token_bytes(one) or b"") for one in range(3072))
    assert tiny.longest_token_bytes == longest > 4


def test_the_256_bytes_have_a_character_each() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    shown = {"!": 33, "~": 126, "¡": 161, "¬": 172, "®": 174, "ÿ": 255, "Ā": 0, "Ġ": 32, "ġ": 127, "ł": 160, "Ń": 173}
    assert {character: BYTE_OF_CHARACTER[character] for character in shown} == shown


def test_which_template_a_conversation_gets(tiny: Tokenizer) -> None:
    given = "{{ tools }}{{ documents }}"
    assert tiny.apply_chat_template(USER, chat_template=given) == "NoneNone"
    assert tiny.choose_template("text", has_tools=False) == "text"
    assert tiny.choose_template(None, has_tools=True) == tiny.chat_template
    whole = tiny.apply_chat_template(USER)
    assert whole.endswith("<|im_start|>assistant\n")
    assert tiny.apply_chat_template(USER, add_generation_prompt=False) + "<|im_start|>assistant\n" == whole


# Pooling prompts.


def test_what_is_empty_or_too_long_is_told_word_by_word(maker: PromptMaker) -> None:
    assert maker.make([CLS] * 12).token_ids == [CLS] * 12
    with pytest.raises(RequestTooLong) as caught:
        maker.make([CLS] * 13)
    assert str(caught.value) == (
        "This model's maximum context length is 12 tokens, but an input has 13 tokens. "
        "Please reduce the length of the input prompt, or give truncate_prompt_tokens."
    )
    assert caught.value.field == "input"
    for empty in ([], ""):
        with pytest.raises(InvalidRequest) as caught:
            replace(maker, add_special_tokens=False, prefix="Q: ").make(empty)
        assert str(caught.value) == "input is empty: it must have at least one token"
    size = maker.vocab_size
    assert maker.make([size - 1, 0]).token_ids == [size - 1, 0]
    for wrong, bound in ((size, f"must be below {size}"), (-1, "must be at least 0")):
        with pytest.raises(InvalidRequest) as caught:
            maker.make([0, wrong])
        assert str(caught.value) == f"input: token id {wrong} is out of vocabulary, {bound}"


def test_token_ids_are_cut_at_their_side(maker: PromptMaker) -> None:
    ids = [CLS, 5, 6, SEP]
    assert replace(maker, truncation=Truncation(num_tokens=2)).make(ids).token_ids == [6, SEP]
    assert replace(maker, truncation=Truncation(num_tokens=2, side="right")).make(ids).token_ids == [CLS, 5]
    left = replace(maker, truncation=Truncation(num_tokens=4)).make("abcdef")
    assert text_of(maker.tokenizer, left.token_ids) == "[ef]"


def test_pieces_of_a_text_that_is_cut_are_none(maker: PromptMaker) -> None:
    long = "abcdefghijklmnop"
    divided = replace(maker, splits_long=True)
    made = divided.make(long)
    assert [text_of(maker.tokenizer, one) for one in made.pieces] == ["[abcdefghij]", "[klmnop]"]
    assert (made.token_ids, made.rest) == (made.pieces[0], (made.pieces[1],))
    assert divided.make("abcdefghij").rest == ()
    cut = replace(divided, truncation=Truncation(num_tokens=5, side="right")).make(long)
    assert (text_of(maker.tokenizer, cut.token_ids), cut.rest) == ("[abc]", ())
    prefixed = replace(divided, prefix="zz").make(long)
    assert text_of(maker.tokenizer, prefixed.token_ids) == "[zzabcdefgh]"
    bare = replace(divided, add_special_tokens=False).make(long)
    assert [text_of(maker.tokenizer, one) for one in bare.pieces] == ["abcdefghijkl", "mnop"]
    assert PoolingPrompt([1, 2]).pieces == [[1, 2]]


def test_lengths_are_looked_at_before_tokens_are_made(maker: PromptMaker) -> None:
    seen: list[tuple[int, bool]] = []
    looking = replace(maker, check_length=lambda size, is_cut: seen.append((size, is_cut)))
    looking.make("abc")
    looking.make(("ab", "c"))
    replace(looking, max_document_tokens=2).make(("ab", "cd"))
    replace(looking, truncation=Truncation(num_tokens=4)).make("abcd")
    replace(looking, splits_long=True).make("abcde")
    looking.make([CLS])
    assert seen == [(3, False), (3, False), (4, True), (4, True), (5, True)]
    seen.clear()
    looking.make_all(["abcd", [CLS], "e"])
    replace(looking, splits_long=True).make_all(["ab"])
    replace(looking, truncation=Truncation(num_tokens=4)).make_all(["abc"])
    assert seen == [(4, False), (1, False), (2, True), (3, True)]


def test_a_document_is_cut_before_it_is_put_to_its_query(maker: PromptMaker) -> None:
    made = replace(maker, max_document_tokens=2).make(("abc", "xyz"))
    assert (text_of(maker.tokenizer, made.token_ids), made.second_text_start) == ("[abc]xy]", 5)
    both = replace(maker, max_query_tokens=1, max_document_tokens=2)
    assert text_of(maker.tokenizer, both.make(("abc", "xyz")).token_ids) == "[a]xy]"
    assert (both.cuts_pairs, maker.cuts_pairs, replace(maker, max_query_tokens=1).cuts_pairs) == (True, False, True)
    whole = replace(maker, max_document_tokens=3).make(("abc", "xyz"))
    assert text_of(maker.tokenizer, whole.token_ids) == "[abc]xyz]"
    bare = replace(maker, add_special_tokens=False).make(("abc", "xyz"))
    assert text_of(maker.tokenizer, bare.token_ids) == "abcxyz"


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        (None, False),
        ("'query' 'document'", True),
        ("\"query\" 'document'", True),
        ("'query'", False),
        ("'document'", False),
        ("query document", False),
    ],
)
def test_which_templates_write_pairs(source: str | None, is_one: bool) -> None:
    assert score_template(source) == (source if is_one else None)


def test_pairs_and_means() -> None:
    assert pairs_of(["a", "b"], ["c", "d"], field="x", other="y") == [("a", "c"), ("b", "d")]
    assert pairs_of(["a"], ["c"], field="x", other="y") == [("a", "c")]
    for first, second, message, field in (
        ([], ["a"], "x is empty: it must have at least one text", "x"),
        (["a"], [], "y is empty: it must have at least one text", "y"),
        (["a", "b", "c"], ["d", "e"], "x has 3 texts, must have 1 or as many as y, 2", "x"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            pairs_of(first, second, field="x", other="y")
        assert (str(caught.value), caught.value.field) == (message, field)
    only = np.array([3, 4], np.float32)
    assert mean_of([only], [9]) is only
    far = np.array([1.002, 0], np.float32)
    unit = np.array([0, 1], np.float32)
    np.testing.assert_allclose(mean_of([far, unit], [1, 1]), [0.501, 0.5], rtol=1e-6)
    near = np.array([1.0005, 0], np.float32)
    assert abs(float(np.linalg.norm(mean_of([near, unit], [1, 1]))) - 1) < 1e-6
    opposite = mean_of([unit, -unit], [1, 1])
    assert (opposite.tolist(), opposite.dtype) == ([0, 0], np.float32)


def test_prompts_of_a_checkpoint_have_names() -> None:
    files = PromptFiles({"query": "Q: ", "passage": "P: "}, "query", "dot")
    assert files.prompt_of(None) == "Q: "
    assert files.prompt_of("search_query") == "Q: "
    assert files.prompt_of("search_document") == "P: "
    assert files.prompt_of("other", is_strict=False) == ""
    with pytest.raises(InvalidRequest) as caught:
        files.prompt_of("o" * 101)
    told = f"prompt_name is '{'o' * 100}', must be one of the model's prompts: query, passage"
    assert (str(caught.value), caught.value.field) == (told, "prompt_name")
    with pytest.raises(InvalidRequest, match="must be one of the model's prompts: none"):
        PromptFiles().prompt_of("a")
    assert PromptFiles().prompt_of(None) == ""
    assert PromptFiles().similarity == "cosine"


# Chat templates.


def test_a_developer_is_the_system_where_a_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    shown = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert render_chat_template(shown, messages=messages) == "system user "
    assert render_chat_template(shown + "{# developer #}", messages=messages) == "developer user "


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_all_names(name: str) -> None:
    shown = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }}{% endfor %}"
    message = {"role": "assistant", "content": "", name: "t"}
    assert render_chat_template(shown, messages=[message]) == "ttt"


def test_what_no_json_holds_is_shown_by_its_type() -> None:
    source = "{{ a }}|{{ b }}|{{ c }}|{{ d }}|{{ e }}|{{ f }}"
    text = render_chat_template(source, messages=USER, a=object(), b=(1, 2), c={"k": (3,)}, d=True, e=1.5, f=None)
    assert text == "<object>|[1, 2]|{'k': [3]}|True|1.5|None"


def test_the_end_of_a_final_message_that_is_not_shown_is_a_fault() -> None:
    for source in ("no content", "{{ messages[0].content | lower }}"):
        with pytest.raises(InvalidRequest) as caught:
            render_chat_template(source, messages=USER, continue_final_message=True)
        told = "continue_final_message: the chat template does not show the final message as it is"
        assert (str(caught.value), caught.value.field) == (told, "messages")
    empty = [{"role": "assistant", "content": None}]
    assert render_chat_template("<{{ messages[0].content }}>", messages=empty, continue_final_message=True) == "<"


def test_underscored_names_are_not_stored() -> None:
    for source in ("{{ namespace(_a=1) }}", "{% set n = namespace() %}{% set n._a = 1 %}"):
        with pytest.raises(InvalidRequest, match="a template cannot store '_a' in a namespace"):
            render_chat_template(source, messages=USER)


@pytest.mark.parametrize(
    ("source", "role", "is_known"),
    [
        ("{% if m.role == 'tool' %}", "tool", True),
        ('{% if m.role == "tool" %}', "tool", True),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "tool", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "tool", False),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "tool", False),
        ("{% if messages[0].role != 'user' %}{{ raise_exception('x') }}{% endif %}", "tool", False),
        (
            "{% if messages[0].role != 'user' %}{{ raise_exception('x') }}{% endif %}"
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
            "tool",
            True,
        ),
        ("tool", "tool", False),
    ],
)
def test_which_roles_a_template_has(source: str, role: str, is_known: bool) -> None:
    assert has_role(source, role) is is_known


def test_a_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    assert load_chat_template(None) is None
    assert load_chat_template("{{ a }}") == "{{ a }}"
    assert load_chat_template("a\nb") == "a\nb"
    path = tmp_path / "template.jinja"
    path.write_text("tämplate", encoding="utf-8")
    assert load_chat_template(str(path)) == "tämplate"
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError) as caught:
        load_chat_template(missing)
    assert str(caught.value).startswith(f"chat_template {missing!r} cannot be read: ")
    assert caught.value.field == "chat_template"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_chat_template(str(path))


def test_a_template_that_is_none_is_told_by_line() -> None:
    check_template("{{ a }}", name="--chat-template", field="chat_template")
    with pytest.raises(ConfigError) as caught:
        check_template("a\n{% if %}", name="--chat-template", field="chat_template")
    assert str(caught.value).startswith("--chat-template is not a Jinja template: line 2: ")
    assert caught.value.field == "chat_template"


# Words and strings.


def test_a_bad_word_is_two_sequences_unless_one_ends_the_other(tiny: Tokenizer) -> None:
    plain = tuple(tiny.encode("the", add_special_tokens=False))
    spaced = tuple(tiny.encode(" the", add_special_tokens=False))
    assert bad_words_token_ids([" the"], tiny) == bad_words_token_ids(["the"], tiny) == (plain, spaced)
    punctuation = bad_words_token_ids(["\x01"], tiny)
    assert len(punctuation) == 1, "a space before it is a token of its own"
    assert bad_words_token_ids([], tiny) == ()


def test_bad_words_have_bounds(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_words_module, "MAX_BAD_WORDS", 2)
    monkeypatch.setattr(bad_words_module, "MAX_BAD_WORD_TOKENS", 3)
    bound = "bad_words must be at most 2 token sequences (with and without a space), got"
    assert len(bad_words_token_ids(["the"], tiny)) == 2
    for words, told in (
        (["\x01"] * 3, f"{bound} 3"),
        (["the", "\x01"], f"{bound} 3"),
        (["\x01\x01\x01\x01"], "bad_words must have at most 3 tokens each, got 4"),
        ([" "], "bad_words must not contain an empty string"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            bad_words_token_ids(words, tiny)
        assert (str(caught.value), caught.value.field) == (told, "bad_words")
    assert len(bad_words_token_ids(["\x01\x01\x01"], tiny)[0]) == 3


def test_of_two_stop_strings_the_one_that_is_whole_first_wins() -> None:
    one = StopStrings(["bc", "abc", "x"])
    found = one.append("zabcx")
    assert (found.text, found.stop_string) == ("za", "bc")
    assert one.flush() == ""
    first = StopStrings(["abc", "bc"], include_in_output=True).append("zabcx")
    assert (first.text, first.stop_string) == ("zabc", "abc")
    held = StopStrings(["aab"])
    assert held.append("xaa").text == "x"
    assert held.append("a").text == "a"
    assert held.append("").text == ""
    assert held.flush() == "aa"
    assert held.flush() == ""
    last = held.append("aab!")
    assert (last.text, last.stop_string) == ("", "aab")
