"""A headless chromium, spoken to over a pipe: pages as wide as a phone, and pictures of them."""

import base64
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")


class Browser:
    """One page in it; `show` loads another."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = os.fdopen(replies, "rb")
        self._said = b""
        self._count = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self._call("Page.enable")

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Load a page on a screen of `width` pixels; below 600 it is that of a phone."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value_of(self, expression: str) -> Any:
        """What a line of JavaScript gives in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"]["value"]

    def picture(self) -> numpy.ndarray:
        """The whole page: rows of pixels of red, green and blue."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"])))
        return numpy.asarray(image.convert("RGB"))

    def close(self) -> None:
        os.close(self._commands)
        self._replies.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._count:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._said:
            data = self._replies.read1(2**20)
            assert data, "the browser is gone"
            self._said += data
        message, _, self._said = self._said.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in `folder`. It reads descriptor 3 and writes descriptor 4."""
    here, there = os.pipe(), os.pipe()
    words = [PROGRAM or "chromium", *_OPTIONS, f"--user-data-dir={folder / 'profile'}"]
    script = f'exec "$@" 3<&{here[0]} 4>&{there[1]}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, "bash", *words],
        pass_fds=(here[0], there[1]),
        stderr=subprocess.DEVNULL,
    )
    os.close(here[0])
    os.close(there[1])
    browser = Browser(here[1], there[0])
    try:
        yield browser
    finally:
        browser.close()
        process.kill()
        process.wait()
