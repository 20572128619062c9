"""The status page in a real browser, and `pagoda top`, over a real stack under load."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_common.process.children import free_port
from tests.process.clients.browser import Browser, missing_browser
from tests.process.stack import Stack, ask, get_status, poll_until
from tests.service.frontend.harness import running_frontend

KEY = "a-key"
SHOTS = os.environ.get("PAGODA_SCREENSHOTS")
"""A folder for the screenshots, for a reader who wants to look."""

needs_browser = pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "there is a browser")


@pytest.fixture(scope="module")
def scheduler_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def stack(scheduler_port: int) -> Iterator[Stack]:
    running = Stack(f"--scheduler-port={scheduler_port}", "--num-gpu-blocks-override=256")
    try:
        running.wait_ready()
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def save(browser: Browser, name: str) -> bytes:
    return browser.screenshot(Path(SHOTS) / f"{name}.png" if SHOTS else None)


def see(browser: Browser, selector: str, *, until: str) -> str:
    """Text of an element as soon as it contains `until`."""
    shown = ""

    def is_there() -> bool:
        nonlocal shown
        shown = browser.text(selector)
        return until in shown

    poll_until(is_there, what=f"{selector} shows {until!r}", log=lambda: browser.text("body"), timeout_s=240)
    return shown


@needs_browser
def test_the_page_shows_the_engine_idle_and_under_load(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.url}/")
    see(browser, "#state", until="ready")
    see(browser, "#groups", until="serving")
    assert "pagoda-tiny" in browser.text("header")
    assert browser.text("#running") == "0"
    light = save(browser, "idle-light")
    browser.set_dark(True)
    dark = save(browser, "idle-dark")
    assert light != dark
    browser.set_dark(False)
    asking = [threading.Thread(target=ask, args=(stack.url,), kwargs={"max_tokens": 500}) for _ in range(3)]
    for thread in asking:
        thread.start()
    see(browser, "#step-stages", until="forward")
    see(browser, "#speed-note", until="peak")
    save(browser, "load-light")
    browser.set_dark(True)
    save(browser, "load-dark")
    browser.set_dark(False)
    for thread in asking:
        thread.join()
    assert browser.complaints() == []


@needs_browser
def test_an_answer_streams_and_can_be_stopped(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.url}/")
    browser.write("#max-tokens", "\ue009a\ue000" + "12")
    browser.write("#question", "Tell me a story about a dog.")
    browser.click("#send")
    see(browser, "#messages", until="tokens · first after")
    save(browser, "chat")
    # The model may end by itself before a hand is there: the page's own request is made endless.
    endless = """
        const send = window.fetch;
        window.fetch = (path, options) => send(path, options?.body
            ? {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true, max_tokens: 900})}
            : options);
    """
    browser.run(endless)
    browser.write("#question", "And one about a cat.\ue007")
    poll_until(lambda: len(browser.text(".message:last-child")) > 5, what="the answer begins", timeout_s=240)
    browser.click("#stop")
    see(browser, ".message:last-child .facts", until="stopped")
    see(browser, "#running", until="0")
    assert browser.complaints() == []


@needs_browser
def test_the_page_fits_a_telephone_and_works_without_a_pointer(stack: Stack, browser: Browser) -> None:
    browser.set_size(390, 844)
    try:
        browser.open(f"{stack.url}/")
        see(browser, "#state", until="ready")
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        save(browser, "telephone")
        unnamed = browser.run("""
            return [...document.querySelectorAll("button, input, textarea, [role]")].filter((one) =>
                !one.innerText && !one.labels?.length && !one.ariaLabel && !one.hasAttribute("aria-labelledby")
                && one.getAttribute("role") !== "status").map((one) => one.id)
        """)
        assert unnamed == []
        browser.click("#theme")
        assert browser.run("return getComputedStyle(document.documentElement).colorScheme") in ("dark", "light")
    finally:
        browser.set_size(1280, 900)


@needs_browser
def test_a_token_shows_what_else_was_likely(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.url}/")
    browser.click("#inspect")
    browser.write("#max-tokens", "\ue009a\ue000" + "6")
    browser.write("#question", "Tell me a story about a dog.\ue007")
    see(browser, "#messages", until="tokens · first after")
    browser.click(".message:last-child .token")
    rows = browser.run("return [...document.querySelectorAll('#alternatives tr')].map((row) => row.innerText)")
    assert len(rows) >= 5
    assert "%" in rows[0]
    save(browser, "tokens")
    assert browser.complaints() == []


@needs_browser
def test_requests_tokens_facts_and_the_past_are_shown(stack: Stack, browser: Browser) -> None:
    asking = threading.Thread(target=ask, args=(stack.url,), kwargs={"max_tokens": 100})
    asking.start()
    asking.join()
    browser.open(f"{stack.url}/")
    see(browser, "#requests", until="finished")
    see(browser, "#facts", until="pagoda-tiny")
    browser.write("#tokens-text", "Once upon a time")
    see(browser, "#tokens-note", until="tokens of 16 characters")
    assert browser.run("return document.querySelectorAll('.piece').length") >= 2
    # The server's points are five seconds apart: the chart has a line when two of them are there.
    script = "return document.querySelector('#next-token-chart .p50').getAttribute('d')"
    poll_until(lambda: bool(browser.run(script)), what="the chart of latencies has a line", timeout_s=240)
    save(browser, "past")
    assert browser.complaints() == []


@needs_browser
def test_an_answer_is_shown_as_markdown_and_never_as_html(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.url}/")
    text = "# Head\\n\\n- one **two**\\n- `<b>`\\n\\n```py\\nx = 1\\n```\\n\\n<img src=x onerror=alert(1)> [a](https://example.org)"
    script = f"""
        const done = arguments[arguments.length - 1];
        return import("./status/markdown.js").then(({{ render }}) => {{
            const box = document.createElement("div");
            box.append(...render("{text}"));
            return box.innerHTML;
        }});
    """
    html = browser.run(script)
    assert "<h3>Head</h3>" in html
    assert "<li>one <strong>two</strong></li><li><code>&lt;b&gt;</code></li>" in html
    assert "<pre><code>x = 1</code></pre>" in html
    assert "<img" not in html
    assert 'href="https://example.org"' in html


@needs_browser
def test_the_request_can_be_copied_as_curl_and_python(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.url}/")
    see(browser, "#model", until="pagoda-tiny")
    # What is copied is caught: a browser without a window has no clipboard.
    browser.run("window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); };")
    browser.run("document.getElementById('system-box').open = true")
    browser.write("#system", "You're brief.")
    browser.write("#max-tokens", "\ue009a\ue000" + "5")
    browser.write("#question", "It's \"quoted\", isn't it?")
    browser.click("#copy-curl")
    browser.click("#copy-python")
    poll_until(lambda: browser.run("return window.copied.length") == 2, what="both are copied")
    curl, python = browser.run("return window.copied")
    done = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, text=True, timeout=240, check=True)
    assert '"role":"assistant"' in done.stdout, done.stdout
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr + python


@needs_browser
def test_figures_turn_grey_when_the_server_is_gone(browser: Browser) -> None:
    stack = Stack("--num-gpu-blocks-override=64")
    try:
        browser.open("about:blank")
        poll_until(lambda: get_status(f"{stack.url}/live") == 200, what="the frontend listens", log=lambda: stack.log)
        browser.open(f"{stack.url}/")
        stack.wait_ready()
        see(browser, "#state", until="ready")
        assert browser.run("return document.getElementById('gone').hidden")
        stack.end()
        see(browser, "#gone", until="has not answered since")
        assert browser.run("return document.body.classList.contains('gone')")
        assert browser.run("return document.getElementById('state').dataset.state") == "away"
        save(browser, "gone")
    finally:
        if stack.popen.poll() is None:
            stack.end()


@pytest.mark.parametrize("by", ["url", "scheduler"])
def test_top_shows_a_frame_of_the_same(stack: Stack, scheduler_port: int, by: str) -> None:
    where = stack.url if by == "url" else f"127.0.0.1:{scheduler_port}"
    command = [sys.executable, "-m", "pagoda", "top", "--once", "--interval=0.5", f"--{by}={where}"]
    asking = threading.Thread(target=ask, args=(stack.url,), kwargs={"max_tokens": 200})
    asking.start()
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
    asking.join()
    assert "pagoda-tiny" in done.stdout
    assert "serving" in done.stdout
    assert "of 4,096 tokens" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@needs_browser
async def test_a_server_with_keys_asks_for_one(browser: Browser) -> None:
    def look(url: str) -> None:
        browser.open(f"{url}/")
        see(browser, "#key-row", until="API key")
        browser.write("#question", "Hello!\ue007")
        see(browser, "#messages", until="asks for an API key")
        poll_until(
            lambda: browser.run("return document.activeElement.id") == "key", what="the key's field has the focus"
        )
        assert browser.run("return document.getElementById('question').value") == "Hello!", "the question is kept"
        browser.write("#key", KEY)
        browser.click("#send")
        see(browser, "#messages", until="tokens · first after")
        save(browser, "key")

    async with running_frontend(api_key=(KEY,)) as running:
        await asyncio.to_thread(look, f"http://127.0.0.1:{running.server.port}")
