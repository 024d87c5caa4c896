"""Logs Lightning's metrics to one CSV file, which a new leader continues."""

from __future__ import annotations

import csv
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import join_once

try:
    from lightning.pytorch import loggers
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter
except ImportError:
    raise UserError(
        "holdfast.reports.lightning_loggers needs the package lightning: "
        "pip install 'holdfast[lightning]'"
    ) from None

RECENT = 64  # rows that every worker keeps, in case that it is to write them
Row = tuple[int, tuple[str, ...]]  # a row's step, and its cells


class CSVLogger(loggers.CSVLogger):
    """Writes each row once, whichever worker leads: `Trainer(logger=CSVLogger("logs"))`.

    Lightning's own begins another file, or deletes what the file holds, with each new leader, and
    rows that were not flushed end with a worker. Without a `version` it is the name of the run's
    directory.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        """Join the job, unless the script has."""
        self._experiment: Any = None
        self._job = join_once()
        if version is None and self._job.run_dir is not None:
            version = self._job.run_dir.name
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._recent: deque[tuple[Mapping[str, Any], int | None]] = deque(maxlen=RECENT)

    @property
    def experiment(self) -> Any:
        """Return the writer of the file; on workers that do not lead, it has no effect."""
        if self._experiment is None and self._job.is_leader:
            os.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir)
        return super().experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record a row, and write rows that no leader has written."""
        self._recent.append((dict(metrics), step))
        if self._job.is_leader:
            while self._recent:
                super().log_metrics(*self._recent.popleft())


class _Writer(ExperimentWriter):
    """Adds rows to a file that may be there already."""

    def __init__(self, log_dir: str) -> None:
        self._written: set[Row] = set()
        super().__init__(log_dir)

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Record a row, unless the file has it."""
        if step is None or (step, tuple(sorted(metrics_dict))) not in self._written:
            super().log_metrics(metrics_dict, step)

    def _check_log_dir_exists(self) -> None:
        """Take over the file's columns and rows, where Lightning's deletes it."""
        if not self._fs.isfile(self.metrics_file_path):
            return
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            text = file.read()
        whole = text[: text.rfind("\n") + 1]  # a leader may have died as it wrote
        if whole != text:
            with self._fs.open(self.metrics_file_path, "w", newline="") as file:
                file.write(whole)
        rows = csv.DictReader(whole.splitlines())
        for row in rows:
            told = tuple(sorted(key for key, text in row.items() if text and key != "step"))
            self._written.add((int(row["step"]), told))
        self.metrics_keys = list(rows.fieldnames or ())
