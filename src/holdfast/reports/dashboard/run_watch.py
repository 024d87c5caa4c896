"""Keeps a feed up to date: with the files of a run, and with the answers of its coordinator.

When nobody answers, the feed says so and goes on with the files; every look asks again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.dashboard.feed import Feed
from holdfast.reports.dashboard.run_files import RunFiles

FILES_S = 0.5  # between looks at the files
STATUS_S = 1.0  # between questions to the coordinator
OVER_S = 5.0  # the same, once the run is over: it may be resumed


class RunWatch:
    """Watches one run. `run` ends only when it is cancelled."""

    def __init__(
        self,
        run_dir: RunDir,
        tls: ssl.SSLContext | None,
        feed: Feed,
        update: Callable[[], None] | None = None,
    ) -> None:
        """`update` brings the files up to date, if they are copies of those elsewhere."""
        self._update = update
        self._run_dir = run_dir
        self._tls = tls
        self._feed = feed
        self._files = RunFiles(run_dir)
        self._answered_at: float | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.gather(self._watch_files(), self._watch_status())

    async def look_at_files(self) -> None:
        """Read the new lines of the files, once. A file that cannot be used now is read later."""
        files = self._files
        try:
            was_cut, events = await asyncio.to_thread(files.read_events)
            if was_cut:
                self._feed.restart("events")
            if events or "events" not in self._feed.state():
                self._feed.append("events", events)
            spec = await asyncio.to_thread(self._run_dir.spec)
            for topics in (
                await asyncio.to_thread(files.read_run, spec),
                files.read_notes(),
                await asyncio.to_thread(files.read_losses),
                await asyncio.to_thread(files.read_time_left),
                await asyncio.to_thread(files.read_times),
            ):
                for topic, value in topics.items():
                    self._feed.publish(topic, value)
            if self._update is not None:
                await asyncio.to_thread(self._update)
        except (HoldfastError, OSError) as error:
            self._feed.publish("files", {"problem": str(error)})
        else:
            self._feed.publish("files", {"problem": ""})

    async def look_at_status(self) -> bool:
        """Ask the coordinator once; return whether it has answered."""
        try:
            status = await asyncio.to_thread(job_status, self._run_dir, self._tls)
        except (HoldfastError, OSError) as error:
            over = self._run_dir.outcome() is not None
            link = {"state": "over" if over else "lost", "text": str(error)}
            self._feed.publish("link", {**link, "answered": self._answered_at})
            self._feed.publish("status", None)
            return False
        self._answered_at = time.time()
        text = f"the coordinator answers (pid {status.coordinator.pid})"
        self._feed.publish("link", {"state": "live", "text": text, "answered": None})
        self._feed.publish("status", describe_status(status))
        return True

    async def _watch_files(self) -> None:
        while True:
            await self.look_at_files()
            await asyncio.sleep(FILES_S)

    async def _watch_status(self) -> None:
        while True:
            answers = await self.look_at_status()
            over = not answers and self._run_dir.outcome() is not None
            await asyncio.sleep(OVER_S if over else STATUS_S)


def describe_status(status: JobStatus) -> dict[str, Any]:
    """Return a status for the page: rows of workers are short, since there may be thousands."""
    return {
        "state": status.state.value,
        "view": status.view,
        "step": status.step,
        "term": status.coordinator.term,
        "leader": status.leader,
        "nodes": [
            {
                "id": node.id,
                "pid": node.pid,
                "silent": node.silent,
                "draining": node.draining,
                "members": node.members,
                "domains": node.domains,
            }
            for node in status.agents
        ],
        "workers": [
            [
                *(each.id, each.agent, each.state.value, each.pid or None, each.incarnation),
                *(each.step, list(each.virtual_ranks), each.detail),
            ]
            for each in status.workers
        ],
    }
