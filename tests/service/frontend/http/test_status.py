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
