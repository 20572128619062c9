"""Which key a call shows, whatever else its headers hold."""

import hashlib

import pytest

from pagoda_common.rpc.bearer import MAX_SHOWN_KEYS, BearerKeys, key_id

KEYS = BearerKeys(("first", "second", "ключ"))
BASIC = ("authorization", "Basic cHJveHk6c2VjcmV0")


def test_an_id_is_the_beginning_of_the_digest_of_the_key() -> None:
    assert key_id("first") == hashlib.sha256(b"first").hexdigest()[:16]
    assert KEYS.accepted([("authorization", "Bearer first")]) == key_id("first")
    raw = "ключ".encode().decode("latin-1")  # as HTTP servers decode headers
    assert KEYS.accepted([("authorization", f"Bearer {raw}")]) == key_id("ключ")


@pytest.mark.parametrize("other", [BASIC, ("authorization", "Bearer junk"), ("authorization", "Digest second")])
@pytest.mark.parametrize("key", ["first", "second"])
def test_the_key_that_opens_is_the_one_that_counts(other: tuple[str, str], key: str) -> None:
    plain, bearer = ("x-api-key", key), ("authorization", f"Bearer {key}")
    for headers in ([other, plain], [plain, other]):
        assert KEYS.accepted(headers, key_header="x-api-key") == key_id(key)
    for headers in ([other, bearer], [bearer, other]):
        assert KEYS.accepted(headers) == key_id(key)


@pytest.mark.parametrize("value", ["bearer first", "BEARER first", "Bearer   first  ", "Bearer first\t"])
def test_case_of_the_scheme_and_white_space_make_no_other_key(value: str) -> None:
    assert KEYS.accepted([("authorization", value)]) == key_id("first")


def test_of_two_keys_the_bearer_token_counts() -> None:
    headers = [("x-api-key", "second"), ("authorization", "Bearer first")]
    assert KEYS.accepted(headers, key_header="x-api-key") == key_id("first")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [BASIC],
        [("authorization", "Bearer")],
        [("authorization", "Bearer First")],
        [("authorization", "first")],
        [("authorization", b"Bearer first")],
        [("x-api-key", "first")],
        [("x-tenant-id", "first")],
        [*[("authorization", "Bearer junk")] * MAX_SHOWN_KEYS, ("authorization", "Bearer first")],
    ],
)
def test_what_shows_no_key_opens_nothing(headers: list[tuple[str, str]]) -> None:
    assert KEYS.accepted(headers) is None
    assert BearerKeys(()).accepted(headers) is None
