"""The status page as files: complete, self-contained, and nothing that a browser may load or send elsewhere."""

import re
from urllib.parse import urljoin

import pytest

from pagoda_frontend.pages.status import FILES, FOLDER
from tests.service.frontend.harness import Running, running_frontend

NAMES = re.compile(r"""(?:src|href|from)\s*=?\s*"([^"#]+)\"""")


async def test_the_page_and_all_that_it_names_are_served(frontend: Running) -> None:
    for path, (_, media_type) in FILES.items():
        response = await frontend.http.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == media_type
        for name in NAMES.findall(response.text):
            if name != "docs":  # FastAPI's
                found = await frontend.http.get(urljoin(f"http://x{path}", name).removeprefix("http://x"))
                assert found.status_code == 200, f"{path} names {name}"


async def test_nothing_comes_from_elsewhere(frontend: Running) -> None:
    policy = (await frontend.http.get("/")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for path in FOLDER.iterdir():
        others = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w./]*", path.read_text()))
        assert others <= {"http://www.w3.org/2000/svg"}, f"{path.name} names {others}"
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=", page), "the policy forbids what stands in the page itself"


async def test_a_page_that_is_known_is_not_sent_again(frontend: Running) -> None:
    first = await frontend.http.get("/")
    again = await frontend.http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await frontend.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


async def test_the_page_needs_no_key_and_shows_none() -> None:
    async with running_frontend(api_key=("sesame",)) as running:
        response = await running.http.get("/")
        assert response.status_code == 200
        assert "sesame" not in response.text
        assert (await running.http.get("/v1/models")).status_code == 401


async def test_it_can_be_turned_off() -> None:
    async with running_frontend(disable_status_page=True) as running:
        assert (await running.http.get("/")).status_code == 404
        assert (await running.http.get("/status/page.js")).status_code == 404


@pytest.mark.parametrize("path", ["/", "/status/page.css"])
async def test_it_works_under_a_prefix(path: str) -> None:
    async with running_frontend(root_path="/models/a") as running:
        assert (await running.http.get(f"/models/a{path}")).status_code == 200


async def test_metrics_say_how_often_the_scheduler_was_lost(frontend: Running) -> None:
    text = (await frontend.http.get("/metrics")).text
    assert "pagoda:scheduler_connected 1.0" in text
    assert "pagoda:scheduler_losses_total 0.0" in text


async def test_the_past_is_kept_by_the_server(frontend: Running) -> None:
    await frontend.complete(max_tokens=3)
    history = frontend.server.serving.history
    moment = frontend.server._parts[0].moment()
    history.add(moment, moment, elapsed_s=5.0, unix_s=7.0)
    answer = (await frontend.http.get("/status/history")).json()
    assert answer["columns"]["time"][-1] == 7.0
    assert {"generated", "running", "kv", "first_token_p50", "first_token_p99", "next_token_p95"} <= set(
        answer["columns"]
    )


async def test_facts_say_what_serves(frontend: Running) -> None:
    facts = (await frontend.http.get("/status/facts")).json()
    assert facts["models"][0] == "tiny"
    assert facts["max_model_len"] == frontend.server.serving.model.max_model_len
    assert facts["needs_key"] is False


async def test_requests_are_listed_and_can_be_aborted(frontend: Running) -> None:
    async with frontend.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": [5], "stream": True, "max_tokens": 100_000}
    ) as response:
        lines = response.aiter_lines()
        await anext(lines)
        (running,) = (await frontend.http.get("/status/requests")).json()["running"]
        assert (running["state"], running["prompt_tokens"]) == ("running", 1)
        aborted = await frontend.http.post(f"/status/requests/{running['id']}/abort")
        assert aborted.json() == {"aborted": running["id"]}
        async for _ in lines:
            pass
    listed = (await frontend.http.get("/status/requests")).json()
    assert listed["running"] == []
    assert (listed["ended"][0]["id"], listed["ended"][0]["state"]) == (running["id"], "aborted")
    missing = await frontend.http.post(f"/status/requests/{running['id']}/abort")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")


async def test_a_key_sees_and_aborts_its_own_requests_alone() -> None:
    async with running_frontend(api_key=("one", "two")) as running:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"model": "tiny", "prompt": [5], "max_tokens": 2}
        done = await running.http.post("/v1/completions", json=body, headers=one)
        assert done.status_code == 200
        assert (await running.http.get("/status/requests")).status_code == 401
        mine = (await running.http.get("/status/requests", headers=one)).json()["ended"]
        assert [call["id"] for call in mine] == [done.json()["id"]]
        assert (await running.http.get("/status/requests", headers=two)).json()["ended"] == []
        path = f"/status/requests/{mine[0]['id']}/abort"
        assert (await running.http.post(path)).status_code == 401
        assert (await running.http.post(path, headers=two)).status_code == 404


async def test_the_page_needs_no_key_for_any_of_its_files() -> None:
    async with running_frontend(api_key=("sesame",)) as running:
        for path in FILES:
            assert (await running.http.get(path)).status_code == 200, path
