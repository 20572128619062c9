"""What a page of another site makes a browser ask of a server without keys: refused, and nothing else is."""

from typing import Any

import pytest

from tests.service.frontend.harness import MODEL, Running, running_frontend

BODY = {"model": MODEL, "prompt": [5], "max_tokens": 1}
ELSEWHERE = "https://evil.example"


async def status(running: Running, path: str = "/v1/completions", method: str = "POST", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body: dict[str, Any] = {"json": BODY} if method == "POST" else {}
    answer = await running.http.request(method, path, headers=named, **body)
    if answer.status_code == 403:
        assert answer.json()["error"]["type"] in ("PermissionDeniedError", "permission_error")
    return answer.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Origin": ELSEWHERE},
        {"Origin": ELSEWHERE},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://localhost:1"},
        {"Origin": ""},
    ],
)
async def test_a_page_of_another_site_changes_nothing(frontend: Running, headers: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v1/messages", "/tokenize", "/sleep"):
        assert await status(frontend, path, **headers) == 403, path
    assert await status(frontend, "/v1/responses/resp_x", "DELETE", **headers) == 403
    assert not frontend.fake.submits
    assert await status(frontend, "/v1/models", "GET", **headers) == 200, "the browser shows it to no other page"


async def test_its_own_page_and_programs_may_call(frontend: Running) -> None:
    own = str(frontend.http.base_url).rstrip("/")
    for headers in (
        {},
        {"Sec_Fetch_Site": "same-origin", "Origin": own},
        {"Sec_Fetch_Site": "same-origin", "Origin": "https://the.proxy"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": own},
        {"Origin": own.upper()},
    ):
        assert await status(frontend, **headers) == 200, headers


async def test_origins_that_are_allowed_may_call() -> None:
    for origins in ((ELSEWHERE,), ("*",)):
        async with running_frontend(allowed_origins=origins) as running:
            headers = {"Sec_Fetch_Site": "cross-site", "Origin": ELSEWHERE}
            assert await status(running, **headers) == 200
            answer = await running.http.post("/v1/completions", json=BODY, headers={"Origin": ELSEWHERE})
            assert answer.headers["access-control-allow-origin"] in origins
            headers["Origin"] = "https://another.example"
            assert await status(running, **headers) == (200 if "*" in origins else 403)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "x.localhost.evil"),
        *("evil.notlocalhost", "localhost.evil.example", "1.2.3.4.5", "[::1].evil.example"),
    ],
)
async def test_a_name_that_leads_to_loopback_from_outside_reaches_nothing(frontend: Running, host: str) -> None:
    for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/", "GET"), ("/metrics", "GET")):
        assert await status(frontend, path, method, Host=host) == 403, path
    assert not frontend.fake.submits


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:1", "[::1]:80", "a.localhost", "x", "gpu-7:80"]
)
async def test_names_and_addresses_of_this_machine_reach_it(frontend: Running, host: str) -> None:
    assert await status(frontend, Host=host) == 200


async def test_further_names_are_allowed_and_keys_need_none() -> None:
    for allowed in (("pagoda.test",), ("*",)):
        async with running_frontend(allowed_hosts=allowed) as running:
            assert await status(running, Host="Pagoda.Test:80") == 200
            assert await status(running, Host="evil.example") == (200 if "*" in allowed else 403)
    async with running_frontend(api_key=("secret",)) as running:
        headers = {"Host": "the.proxy", "Origin": ELSEWHERE, "Sec_Fetch_Site": "cross-site"}
        assert await status(running, **headers) == 401
        assert await status(running, Authorization="Bearer secret", **headers) == 200
    async with running_frontend(host="0.0.0.0", grpc_host="127.0.0.1") as running:
        assert await status(running, Host="any.example") == 200
