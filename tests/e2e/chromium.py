"""Headless Chromium for tests of pages: console messages, requests, screenshots, and what JavaScript finds in a page.

It speaks the DevTools protocol over a pair of pipes: no driver, no port and no further package is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
# no sandbox, because tests run as root in containers; no second process for a GPU that is not there
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
FLAGS += ["--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"]


def program() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    return None if program() else f"Chromium is not installed ({', '.join(NAMES)} not found; Debian: chromium)"


class Browser:
    """One tab of one browser process; `close` ends it.

    Attributes:
        messages: warnings and errors of the console, exceptions, and failed or blocked requests of all pages so far.
        requests: the addresses that all pages so far asked for.
    """

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [str(program()), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # the browser reads commands from descriptor 3 and writes answers to descriptor 4; bash moves ours there
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._events = b"", 0, list[dict[str, Any]]()
        self.messages, self.requests = list[str](), list[str]()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The answer of the tab to a command of the protocol."""
        return self._call(method, session=self._session, **arguments)

    def open(self, file: Path, width: int = 1280, height: int = 900, *, wait_for_load: bool = True) -> None:
        """Loads a file in a window of this size and waits until it is loaded, with all that it asks for."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        event = "Page.loadEventFired" if wait_for_load else "Page.frameNavigated"
        self._wait(lambda: any(each.get("method") == event for each in self._events), "the page to load")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until a JavaScript expression is true; the page may be replaced meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value"):
            assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {expression}"
            time.sleep(0.1)

    def image(self, clip: dict[str, float]) -> bytes:
        """A PNG of the part {x, y, width, height} of the page."""
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        return base64.b64decode(answer["data"])

    def forget(self) -> None:
        """Empties `messages` and `requests`."""
        self.messages.clear()
        self.requests.clear()

    def close(self) -> None:
        """Ends the browser."""
        for descriptor in (self._write, self._read):
            os.close(descriptor)  # it ends when its pipe does
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": arguments}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answers.extend(event for event in self._events if event.get("id") == number)
            return bool(answers)

        self._wait(answered, f"the answer to {method}")
        assert "error" not in answers[0], f"{method}: {answers[0]}"
        return answers[0]["result"]

    def _wait(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, f"waited for {what}: the browser {'ended' if ready else f'was silent for {PATIENCE_S} s'}"
            *texts, self._buffer = (self._buffer + data).split(b"\0")
            for text in texts:
                event = json.loads(text)
                self._events.append(event)
                self._note(event.get("method", ""), event.get("params", {}))

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.messages.append(f"console: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.messages.append(f"log: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.loadingFailed":
            self.messages.append(f"request: {parameters['errorText']}")
