"""`holdfast trace RUN` writes what a run did as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.time_lines import read_times
from holdfast.engine.runtime.rundir import RunDir, read_run_events
from holdfast.reports.trace import trace_entries


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast trace`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(options.run_dir)
    entries = trace_entries(read_times(run_dir.path), read_run_events(run_dir))
    path = options.output or run_dir.path / "trace.json"
    try:
        with open(path, "w", encoding="utf-8") as file:
            count = _write(file, entries)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print_plain(f"trace: {path}, {count} entries; open it at https://ui.perfetto.dev")
    return 0


def _write(file: IO[str], entries: Iterator[dict[str, object]]) -> int:
    """Write the entries one by one; return how many there were."""
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for count, entry in enumerate(entries, 1):
        file.write((",\n" if count > 1 else "") + json.dumps(entry))
    file.write("\n]}\n")
    return count


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast trace",
        description="Write a trace of a run in Chrome's format: a lane for each worker, with the "
        "uses of its time, events with arrows from their causes, and incidents.",
    )
    found.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    found.add_argument(
        "--output", type=Path, metavar="FILE", help="write it here (default: RUN/trace.json)"
    )
    return found
