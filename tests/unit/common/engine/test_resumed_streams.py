"""A stream that another frontend resumes: what the client has is replayed, what it lacks comes once."""

from dataclasses import replace

import pytest

from pagoda_common.engine.generation import TextStream
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence, EngineRequest, EngineStream, Known, SequenceLog
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.text.tokenizer import Tokenizer

TOKENS = [40, 41, 42, 43]


class StreamsOnly:
    """An engine as far as TextStream asks for it: it makes streams, and the test feeds them."""

    def __init__(self) -> None:
        self.stream: EngineStream | None = None

    def submit(self, request: EngineRequest) -> EngineStream:
        self.stream = EngineStream(request=request, on_stop=lambda *_: None, on_abort=lambda *_: None)
        return self.stream


def resumed(num_known: int) -> EngineRequest:
    """A request of which the engine has all of TOKENS and the client `num_known`."""
    adopted = AdoptedRequest(
        request_id="a",
        attempt=1,
        prompt_token_ids=[5, 6],
        seed=3,
        arrival_time_ns=1,
        timeout_s=0.0,
        sequences=[AdoptedSequence(token_ids=TOKENS)],
        note=b"",
    )
    params = SamplingParams(max_tokens=9)
    request = EngineRequest(request_id="a", prompt_token_ids=[5, 6], sampling_params=params)
    return replace(request, adopted=adopted, known=(Known(num_known),))


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[-float(token_id)], sampled_rank=1)


@pytest.mark.parametrize("num_known", range(len(TOKENS) + 1))
async def test_what_the_client_has_is_replayed_and_the_rest_comes_once(num_known: int) -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    engine = StreamsOnly()
    stream = TextStream(engine=engine, tokenizer=tokenizer, request=resumed(num_known))  # type: ignore[arg-type]  # a fake
    deltas = await stream.get()
    had = [token for delta in deltas if delta.is_replayed for token in delta.token_ids]
    lacked = [token for delta in deltas if not delta.is_replayed for token in delta.token_ids]
    assert (had, lacked) == (TOKENS[:num_known], TOKENS[num_known:])
    assert [delta.offset for delta in deltas if not delta.is_replayed] == [num_known] * (num_known < len(TOKENS))
    whole = tokenizer.detokenizer([5, 6], skip_special_tokens=True)
    assert "".join(delta.text for delta in deltas) == whole.append(TOKENS)
    stream.close()


@pytest.mark.parametrize("num_old", range(3))
def test_log_probabilities_that_overlap_are_taken_once(num_old: int) -> None:
    stream = EngineStream(
        request=EngineRequest(
            request_id="a", prompt_token_ids=[5], sampling_params=SamplingParams(max_tokens=9, logprobs=0)
        ),
        on_stop=lambda *_: None,
        on_abort=lambda *_: None,
    )
    log: SequenceLog = stream.sequences[0]
    assert log.extend(0, TOKENS[:2], [entry(token) for token in TOKENS[:2]])
    again = TOKENS[2 - num_old :]  # the engine goes on a little before the place that was reached
    assert log.extend(2 - num_old, again, [entry(token) for token in again])
    assert log.token_ids == TOKENS
    assert log.logprobs == [entry(token) for token in TOKENS]
