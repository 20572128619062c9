"""A headless Chromium for the tests of pages, over WebDriver (https://www.w3.org/TR/webdriver2/)."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key of an element's reference, from the standard."""


def missing_browser() -> str:
    """Why there is no browser here; empty when there is one."""
    programs = ("chromedriver", "chromium")
    missing = [program for program in programs if shutil.which(program) is None]
    return f"no {' and no '.join(missing)} on this machine" if missing else ""


class Browser:
    """One browser window. Used as a context manager."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        self._size = f"--window-size={width},{height}"
        self._folder = tempfile.TemporaryDirectory(prefix="pagoda-browser-")
        self._driver: subprocess.Popen[str] | None = None
        self._url = ""

    def __enter__(self) -> Self:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        self._driver = driver
        assert driver.stdout is not None
        ports = (match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
        port = next(ports, None)
        if port is None:
            raise RuntimeError(f"chromedriver ended with code {driver.wait()}")
        root = f"http://127.0.0.1:{port}"
        options = {"args": [*FLAGS, self._size, f"--user-data-dir={self._folder.name}"]}
        capabilities = {
            "alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
        }
        self._url = f"{root}/session"
        session = self._call("POST", "", {"capabilities": capabilities})
        self._url = f"{root}/session/{session['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._driver is not None
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()
            self._folder.cleanup()

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What `script`, a function's body, returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """Text of an element as it is shown."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        """As a user does: fails where it is hidden or covered."""
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        """Type into a field."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def set_dark(self, is_dark: bool) -> None:
        """What the reader's system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._call("POST", "/goog/cdp/execute", command)

    def set_size(self, width: int, height: int) -> None:
        """Of the page."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": params})

    def screenshot(self, path: Path | None = None) -> bytes:
        """The window as PNG, also written to `path`."""
        png = base64.b64decode(self._call("GET", "/screenshot"))
        if path is not None:
            path.write_bytes(png)
        return png

    def complaints(self) -> list[str]:
        """What the page has logged as a warning or an error since the last call: refused resources, exceptions."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]
