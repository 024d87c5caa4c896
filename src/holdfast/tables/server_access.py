"""Lets all groups of tables of a worker reach the job's servers, and reports on new servers."""

from __future__ import annotations

import threading

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.train.script.service_link import ServiceLink
from holdfast.tables.core.heirs import HeirProgress, HolderAnswer


class ServerAccess:
    """Reports which new processes of servers have all rows, and the newest layout of the rows.

    `link`: how this worker reaches the servers. A report has both, and is made when one changes.
    Threads may share this.
    """

    def __init__(self, link: ServiceLink) -> None:
        self.link = link
        self._reported: tuple[tuple[str, ...], ServerLayout] | None = None
        self._progress = HeirProgress(link.layout, link.settings.replicas)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Report for the first time."""
        with self._lock:
            self._report_news()

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self._progress.layout

    def change_layout(self, layout: ServerLayout) -> None:
        """Use another layout, if it is newer."""
        with self._lock:
            if layout.number > self.layout.number:
                self._progress.change_layout(layout)
                self._report_news()

    def add_group(self, group: str) -> None:
        """Add a group of tables."""
        with self._lock:
            self._progress.add_group(group)

    def record_answer(self, group: str, answer: HolderAnswer) -> None:
        """Record a server's answer to an update: see HeirProgress."""
        with self._lock:
            self._progress.record_answer(group, answer)
            self._report_news()

    def record_silence(self, group: str, server: int) -> None:
        """Record that a server has not answered, or does not exist."""
        with self._lock:
            self._progress.record_silence(group, server)
            self._report_news()

    def _report_news(self) -> None:
        found = self._progress.list_complete(), self.layout
        if found != self._reported:
            self._reported = found
            self.link.report(*found)
