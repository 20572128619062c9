"""An echoed prompt shows its special tokens where the completion does."""

from typing import Any

import pytest

from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LogprobWriter

TOKENIZER = Tokenizer.load("pagoda-tiny")
TEXT = "<|im_start|>user\nhi<|im_end|>"


@pytest.mark.parametrize(("skips", "shown"), [(True, "user\nhi"), (False, TEXT)])
def test_special_tokens_of_a_prompt_in_ids_are_shown_when_asked_for(skips: bool, shown: str) -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    writer = LogprobWriter(tokenizer=TOKENIZER, num_top=0)
    echo = Echo(text=None, token_ids=ids, tokenizer=TOKENIZER, logprobs=writer, skip_special_tokens=skips)
    choice: dict[str, Any] = {"text": " there", "logprobs": None}
    positions = [None, *(TokenLogprobs(token_ids=[one], logprobs=[-1.0], sampled_rank=1) for one in ids[1:])]
    echo.put_before(choice, positions)
    assert choice["text"] == shown + " there"
    assert choice["logprobs"]["text_offset"][-1] == len(shown) - (0 if skips else len("<|im_end|>"))


def test_a_prompt_in_text_is_shown_as_it_was_given() -> None:
    ids = TOKENIZER.encode(TEXT)
    echo = Echo(text=TEXT, token_ids=ids, tokenizer=TOKENIZER, logprobs=None, skip_special_tokens=True)
    assert echo.text == TEXT
