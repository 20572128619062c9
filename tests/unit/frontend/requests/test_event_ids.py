"""Ids of events: where they stand in a body, and what they say."""

import pytest

from pagoda_common.engine.stream import Known
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.requests.event_ids import EventIds, place_of, with_id


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'data: {"text":"data: x"}\n\n', b'id: 1\ndata: {"text":"data: x"}\n\n'),
        (b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n", b"event: a\ndata: 1\n\nid: 1\nevent: b\ndata: 2\n\n"),
    ],
)
def test_the_last_event_has_the_id_whatever_its_text_is(body: bytes, expected: bytes) -> None:
    assert with_id(body, b"id: 1\n") == expected


def test_an_id_says_what_the_client_has_of_each_sequence() -> None:
    ids = EventIds(response_id="resp_a:b", n=2)
    ids.advance(SequenceDelta(index=1, text="", token_ids=[], offset=0, num_output_tokens=7, finish_reason="stop"))
    line = ids.line(12).decode()
    place = place_of({"last-event-id": line.removeprefix("id: ").strip()})
    assert place is not None
    assert (place.key, place.num_events) == ("resp_a:b", 12)
    assert place.known == (Known(0), Known(7, is_finished=True))


@pytest.mark.parametrize("given", ["", "a", "a:", "a:1,", "a:-1", "a:1@", "a b:1", "a:1" + ",1" * 9000])
def test_what_is_no_id_of_ours_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        place_of({"last-event-id": given})
    assert caught.value.field == "Last-Event-ID"


def test_without_the_header_nothing_is_resumed() -> None:
    assert place_of({}) is None
