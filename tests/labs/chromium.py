"""Drives a headless Chromium by its debugging protocol, over two pipes, without further packages.

with Chromium(tmp_path) as browser:
    browser.open("http://127.0.0.1:8000/")
    browser.until("document.title === 'ready'", 30.0)
    (tmp_path / "page.png").write_bytes(browser.screenshot())
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import WorldError

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0
LOOK_S = 0.05
CHUNK_BYTES = 1 << 16
KEYS = {  # by name: their codes
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
# Chromium reads orders from descriptor 3, and writes answers to descriptor 4.
LAUNCH = (
    "import fcntl, os, sys\n"
    "apart = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 64) for fd in sys.argv[1:3]]\n"
    "[os.dup2(fd, 3 + i) for i, fd in enumerate(apart)]\n"
    "os.execv(sys.argv[3], sys.argv[3:])\n"
)
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_chromium() -> str:
    """Return the path of the browser; empty if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Chromium:
    """Is one browser with one page. WorldError if it does not answer or a script fails."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        self._profile = profile
        self._size = (width, height)
        self._popen: subprocess.Popen[bytes] | None = None
        self._orders = self._answers = -1
        self._buffer = b""
        self._count = 0
        self._session = ""
        self.complaints: list[str] = []  # errors of scripts and of the console so far

    def __enter__(self) -> Chromium:
        theirs_in, self._orders = os.pipe()
        self._answers, theirs_out = os.pipe()
        self._popen = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), find_chromium()),
                *(*OPTIONS, f"--user-data-dir={self._profile}", "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait(ANSWER_S)
        os.close(self._orders)
        os.close(self._answers)

    def open(self, url: str) -> None:
        """Go to a page. WorldError if there is none."""
        answer = self._call("Page.navigate", url=url)
        if problem := answer.get("errorText"):
            raise WorldError(f"{url} cannot be opened: {problem}")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and whether the reader prefers dark pages."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600),
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """Return the value of a script's expression in the page, as JSON has it."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise WorldError(f"{script} fails: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, script: str, limit_s: float) -> Any:
        """Wait until an expression is true, and return it. WorldError if it stays false."""
        deadline = time.monotonic() + limit_s
        while not (found := self.run(script)):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise WorldError(f"not in {limit_s:g} s: {script}\n{text}")
            time.sleep(LOOK_S)
        return found

    def press(self, key: str) -> None:
        """Press and release a key by its name in KEYS."""
        names = dict(key=key, code=key, windowsVirtualKeyCode=KEYS[key])
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **names)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a picture of the page as PNG. `whole`: also of the parts below the window."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        order = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != self._count:
                self._note(answer.get("method", ""), answer.get("params", {}))
                continue
            if "error" in answer:
                raise WorldError(f"{method} fails: {answer['error']}")
            found: dict[str, Any] = answer["result"]
            return found

    def _note(self, event: str, details: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            entry = details["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if not selector.select(ANSWER_S):
                    raise WorldError(f"Chromium has not answered in {ANSWER_S:g} s")
            data = os.read(self._answers, CHUNK_BYTES)
            if not data:
                raise WorldError("Chromium has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
