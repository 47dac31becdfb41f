"""A real browser, Chromium, without a window: driven by its DevTools protocol over a pipe, which needs no library."""

import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""Its path, or None."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
LOADED = "Page.loadEventFired"
SECONDS = 120


class Browser:
    """One Chromium with one page.

    Attributes:
        events: (method, parameters) of every event of the page, in order.
    """

    def __init__(self, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # It reads commands from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", str(CHROMIUM), *options, "--no-first-run", "--disable-extensions",
             f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self._read, False)
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._keep(answer)

    def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        """Load a page of a width in pixels, light or dark."""
        self.events.clear()
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.do("Page.navigate", url=url)
        while LOADED not in [method for method, _ in self.events]:
            self._keep(self._message())

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page."""
        result = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _keep(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))

    def _message(self) -> dict[str, Any]:
        late = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            try:
                part = os.read(self._read, 1 << 20)
            except BlockingIOError:
                assert time.monotonic() < late, "the browser does not answer"
                time.sleep(0.01)
                continue
            assert part, "the browser has ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
