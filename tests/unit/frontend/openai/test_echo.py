"""An echoed prompt is shown as it was given, with the special tokens that it names."""

from typing import Any

from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LogprobWriter

TOKENIZER = Tokenizer.load("pagoda-tiny")
TEXT = "<|im_start|>user\nhi<|im_end|>"


def test_special_tokens_of_a_prompt_in_ids_are_shown() -> None:
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    writer = LogprobWriter(tokenizer=TOKENIZER, num_top=0)
    echo = Echo(text=None, token_ids=ids, tokenizer=TOKENIZER, logprobs=writer)
    choice: dict[str, Any] = {"text": " there", "logprobs": None}
    positions = [None, *(TokenLogprobs(token_ids=[one], logprobs=[-1.0], sampled_rank=1) for one in ids[1:])]
    echo.put_before(choice, positions)
    assert choice["text"] == TEXT + " there"
    assert choice["logprobs"]["text_offset"][-1] == len(TEXT) - len("<|im_end|>")


def test_a_prompt_in_text_is_shown_as_it_was_given() -> None:
    ids = TOKENIZER.encode(TEXT)
    echo = Echo(text=TEXT, token_ids=ids, tokenizer=TOKENIZER, logprobs=None)
    assert echo.text == TEXT
