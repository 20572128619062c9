"""What LLM.get_tokenizer gives has transformers' names, defaults and answers."""

from typing import Any

import pytest

from pagoda.llm.hub_tokenizer import HubTokenizer
from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer

TEXT = "Once upon a time<|im_end|>, ü"
CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I"}]


@pytest.fixture(scope="module")
def ours() -> HubTokenizer:
    return HubTokenizer(Tokenizer.load(EMBEDDED_MODEL))


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(resolve_model(EMBEDDED_MODEL))


def test_it_answers_as_transformers_does(ours: HubTokenizer, theirs: Any) -> None:
    ids = theirs.encode(TEXT)
    assert ours.encode(TEXT) == ids
    assert ours.encode(TEXT, add_special_tokens=False) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours([TEXT, "a"])["attention_mask"] == theirs([TEXT, "a"])["attention_mask"]
    assert ours(TEXT, truncation=True, max_length=3).input_ids == theirs(TEXT, truncation=True, max_length=3).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids[0]) == theirs.decode(ids[0])
    assert ours.batch_decode([ids, ids[:2]]) == theirs.batch_decode([ids, ids[:2]])
    assert ours.tokenize(TEXT) == theirs.tokenize(TEXT)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens) == ids
    assert ours.convert_tokens_to_ids(tokens[0]) == ids[0]
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)


def test_an_unknown_token_has_the_id_of_the_unknown_one(ours: HubTokenizer) -> None:
    assert ours.convert_tokens_to_ids("no such token") is ours.unk_token_id is None
    known, token_id = next(iter(ours.get_vocab().items()))
    with_unknown = HubTokenizer(ours.backend)
    with_unknown.unk_token_id = 7
    assert with_unknown.convert_tokens_to_ids("no such token") == 7
    assert with_unknown.convert_tokens_to_ids([known, "no such token"]) == [token_id, 7]
    assert ours.convert_ids_to_tokens([token_id, 10**9]) == [known, None]


def test_special_tokens_are_those_of_transformers(ours: HubTokenizer, theirs: Any) -> None:
    for name in ("eos", "bos", "pad", "unk"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"tokenize": False},
        {"tokenize": False, "add_generation_prompt": True},
        {"tokenize": False, "continue_final_message": True},
        {"return_dict": False},
    ],
)
def test_conversations_are_rendered_as_transformers_does(
    ours: HubTokenizer, theirs: Any, options: dict[str, Any]
) -> None:
    assert ours.apply_chat_template(CONVERSATION, **options) == theirs.apply_chat_template(CONVERSATION, **options)
    both = [CONVERSATION, CONVERSATION[1:]]
    assert ours.apply_chat_template(both, **options) == theirs.apply_chat_template(both, **options)


def test_a_conversation_is_token_ids_by_default(ours: HubTokenizer, theirs: Any) -> None:
    expected = theirs.apply_chat_template(CONVERSATION)
    given = ours.apply_chat_template(CONVERSATION)
    assert given.input_ids == expected["input_ids"]
    assert given["attention_mask"] == expected["attention_mask"]
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = given.token_type_ids


def test_what_there_is_not_is_refused(ours: HubTokenizer) -> None:
    assert ours("a", padding=False).input_ids == ours.encode("a")
    with pytest.raises(InvalidRequest, match="return_tensors is not supported"):
        ours("a", return_tensors="pt")
