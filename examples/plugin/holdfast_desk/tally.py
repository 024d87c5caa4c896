"""Counts the events of a run by their kind: a listener next to the run, and a command after it.

The listener is `python -m holdfast_desk.tally RUN_DIR PARENT_PID`.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.host.lifetime import Orders, die_with_parent
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.supervise import Kept

LOOK_S = 1.0


def listen(run_dir: RunDir, tls: Path | None) -> Kept:
    """Return a process that keeps RUN_DIR/tally.json up to date during the whole run."""
    command = [sys.executable, "-m", "holdfast_desk.tally", str(run_dir.path), str(os.getpid())]
    return Kept("tally", lambda starts: command, serves=True)


def main(argv: Sequence[str]) -> int:
    """Print what `holdfast tally RUN` counts. Returns the exit status."""
    print(json.dumps(count(RunDir(Path(argv[0])))))
    return 0


def count(run_dir: RunDir) -> dict[str, int]:
    """Return the number of events of each kind."""
    lines = run_dir.events.read_text().splitlines() if run_dir.events.exists() else []
    return dict(Counter(json.loads(line)["kind"] for line in lines))


def keep(run_dir: RunDir, parent: int) -> None:
    """Write the counts now and then, and once more when the launcher orders the end."""
    die_with_parent(parent)
    orders = Orders.receive()
    ended = False
    while not ended:
        ended = bool(select.select([orders.descriptor], [], [], LOOK_S)[0])
        (run_dir.path / "tally.json").write_text(json.dumps(count(run_dir)))


if __name__ == "__main__":
    keep(RunDir(Path(sys.argv[1])), int(sys.argv[2]))
