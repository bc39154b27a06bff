"""A headless Chromium, driven by its debugging protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 60


class Browser:
    """A browser with one page. Callers close it.

    Args:
        folder: for its profile.

    Attributes:
        problems: the page's console messages of script errors and of what a policy has forbidden.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # The protocol's pipes are descriptors 3 and 4; a shell sets them so that this process's own ones stay as they
        # are.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs_in, theirs_out],
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> Any:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0], "the browser is silent"
            self._buffer += os.read(self._in, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def show(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        """Open a page in a view of this size."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.scheme(dark)
        self.ask("Page.navigate", url=url)

    def scheme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def evaluate(self, expression: str) -> Any:
        """Return the awaited value of a JavaScript expression."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression: str, seconds: float = 30) -> Any:
        """Wait until the expression is truthy, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"waited in vain for {expression}; {self.problems}"
            time.sleep(0.1)
        return value

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        box = self.evaluate(
            f"(e => {{ e.scrollIntoView(); const r = e.getBoundingClientRect(); "
            f"return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({selector!r}))"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self) -> bytes:
        """Return a PNG of the whole page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
