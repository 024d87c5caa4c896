"""Asks Ray through a process that may hang or end at any time (ray_driver.py)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import Refused, Unreachable, UserError
from holdfast.engine.net.readiness import wait_readable
from holdfast.engine.state.store.regular_files import append_regular

ANSWER_S = 25.0  # with the start of a driver


class RayLink:
    """Keeps one driver while it answers, and starts it when it is needed. Threads may share it.

    `log`: where Ray's own messages go; without one they go where ours do.
    """

    def __init__(
        self, command: Sequence[str], log: Path | None = None, answer_s: float = ANSWER_S
    ) -> None:
        self._command = tuple(command)
        self._log = log
        self._answer_s = answer_s
        self._alone = threading.Lock()
        self._driver: subprocess.Popen[bytes] | None = None

    def ask(self, word: str, *given: Any) -> Any:
        """Return the answer to one question. Refused, or Unreachable: it may have been done."""
        until = time.monotonic() + self._answer_s
        with self._alone:
            driver = self._ensure_driver()
            line = b""
            with contextlib.suppress(OSError):
                assert driver.stdin is not None
                driver.stdin.write(json.dumps([word, given]).encode() + b"\n")
                driver.stdin.flush()
                line = _line(driver, until)
            if not line:
                self._end(driver)
                raise Unreachable(
                    "Ray does not answer" + (f" (see {self._log})" if self._log else "")
                )
        reply = json.loads(line)
        if "problem" in reply:
            kind = Refused if reply["refused"] else Unreachable
            raise kind(f"Ray says: {reply['problem']}")
        return reply["found"]

    def close(self) -> None:
        """End the driver; callers that wait for its answer get none."""
        if self._driver is not None:
            self._end(self._driver)

    def _ensure_driver(self) -> subprocess.Popen[bytes]:
        if self._driver is None or self._driver.poll() is not None:
            with contextlib.ExitStack() as stack:
                log = None
                if self._log is not None:
                    self._log.parent.mkdir(parents=True, exist_ok=True)
                    log = stack.enter_context(open(append_regular(self._log), "ab"))
                self._driver = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        return self._driver

    def _end(self, driver: subprocess.Popen[bytes]) -> None:
        driver.kill()
        driver.wait()


def _line(driver: subprocess.Popen[bytes], until: float) -> bytes:
    """Read one line; empty if it does not come in time, or at all."""
    assert driver.stdout is not None
    found = b""
    while not found.endswith(b"\n"):
        left_s = max(until - time.monotonic(), 0.0)
        if not wait_readable([driver.stdout], left_s):
            return b""
        more = os.read(driver.stdout.fileno(), 1 << 20)
        if not more:
            return b""
        found += more
    return found


def link_to(address: str, log: Path | None = None) -> RayLink:
    """Return a link to the cluster at an address. UserError: Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: pip install 'holdfast[ray]'")
    return RayLink((sys.executable, "-m", "holdfast.clusters.ray.ray_driver", address), log)
