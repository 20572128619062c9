"""Log probabilities keyed by text lose no token."""

from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.openai.logprobs import LogprobWriter

TOKENIZER = Tokenizer.load("pagoda-tiny")


def parts_of_characters(number: int) -> list[int]:
    ids = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_text(i) == "\N{REPLACEMENT CHARACTER}"]
    return ids[:number]


def position(token_ids: list[int]) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=token_ids, logprobs=[-1.0 - place for place in range(len(token_ids))], sampled_rank=1
    )


def test_parts_of_characters_have_an_entry_each() -> None:
    ids = parts_of_characters(5)
    shown = LogprobWriter(tokenizer=TOKENIZER, num_top=5).for_completion([position(ids)], [0])
    [top] = shown["top_logprobs"]
    assert len(top) == 5
    assert top[shown["tokens"][0]] == shown["token_logprobs"][0] == -1.0
    assert sorted(top.values()) == [-5.0, -4.0, -3.0, -2.0, -1.0]
    raw = TOKENIZER.token_bytes(ids[1]) or b""
    assert top["bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)] == -2.0


def test_whole_texts_that_are_alike_are_told_apart_by_id() -> None:
    class Alike(Tokenizer):
        def token_text(self, token_id: int) -> str:
            return "same"

        def token_bytes(self, token_id: int) -> bytes | None:
            return b"same"

    loaded = Alike.load("pagoda-tiny")
    [top] = LogprobWriter(tokenizer=loaded, num_top=3).for_completion([position([7, 8, 9])], [0])["top_logprobs"]
    assert top == {"same": -1.0, "token_id:8": -2.0, "token_id:9": -3.0}
