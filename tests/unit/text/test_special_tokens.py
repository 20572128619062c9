"""Special tokens in the output are written as transformers' fast tokenizers write them."""

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast

from pagoda_common.text.tokenizer import Tokenizer
from pagoda_common.text.tokenizer_files import TokenizerFiles
from tests.unit.text.tokenizers_at_hand import FOLDER, NAMES, load


def word_piece() -> Tokenizer:
    """A decoder that puts a space before every token that is no continuation."""
    words = ["[UNK]", "hello", "there", "##ly", "friend"]
    fast = FastTokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = token_decoders.WordPiece()
    fast.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    return Tokenizer(name="word-piece", fast=fast, files=TokenizerFiles(directory=FOLDER, config={}, special_tokens={}))


@pytest.mark.parametrize("spaces_between_special_tokens", [True, False])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "word-piece"])
def test_special_tokens_are_written_as_transformers_does(
    name: str, skip_special_tokens: bool, spaces_between_special_tokens: bool
) -> None:
    tokenizer = word_piece() if name == "word-piece" else load(name)
    special = sorted(tokenizer._vocabulary.special_ids)[:2]
    words = tokenizer.encode("hello there friend", add_special_tokens=False)
    ids = [*words, *special, *special, *words, special[0], *words]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._fast)
    expected = theirs.decode(
        ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    text = "".join([detokenizer.append([token_id]) for token_id in ids]) + detokenizer.flush()
    assert text == expected
    assert (tokenizer._fast.id_to_token(special[0]) in text) is not skip_special_tokens
