"""`holdfast top RUN` shows a running job on the terminal, and keeps the picture up to date.

It asks the coordinator and reads the run's files; it decides nothing.
"""

from __future__ import annotations

import argparse
import ssl
import time
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.commands.shared_options import add_tls
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.net.tls import client_of
from holdfast.engine.records.goodput import Goodput, share_out
from holdfast.engine.records.incidents import describe_cost
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.summary import describe_left, format_clock, summarize
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus, ProcessPhase
from holdfast.engine.runtime.rundir import RunDir, check_run

LOOK_S = 1.0
GOODPUT_S = 10.0  # between two looks at all times of workers
INCIDENTS = 3
COLOURS = {
    ProcessPhase.COMPUTING: "green",
    ProcessPhase.WAITING: "green",
    ProcessPhase.LOST: "red",
    ProcessPhase.FAILED: "red",
    ProcessPhase.STOPPED: "red",
    ProcessPhase.CHANGING_VIEW: "yellow",
    ProcessPhase.JOINING: "yellow",
    ProcessPhase.BOOTING: "yellow",
}


def main(argv: list[str]) -> int:
    """Run the command; `argv` follows `holdfast top`."""
    options = parser().parse_args(argv)
    picture = Picture(RunDir(options.run_dir), client_of(options.tls))
    console = PlainConsole()
    if options.once or not console.is_terminal:
        console.print(picture.draw())
        return 0
    try:
        with Live(picture.draw(), console=console, auto_refresh=False, screen=False) as live:
            while not picture.is_over:
                time.sleep(LOOK_S)
                live.update(picture.draw(), refresh=True)
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast top",
        description="Show a running job: step, rate, loss, goodput, workers and the last "
        "incidents. It ends with the run, or with Ctrl-C.",
    )
    found.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    found.add_argument("--once", action="store_true", help="print one picture and end")
    add_tls(found)
    return found


class Picture:
    """Draws the present state of a run."""

    def __init__(self, run_dir: RunDir, tls: ssl.SSLContext | None) -> None:
        check_run(run_dir)
        self._run_dir = run_dir
        self._tls = tls
        self._tail = RunTail(run_dir.path)
        self._goodput: Goodput | None = None
        self._goodput_at = float("-inf")

    @property
    def is_over(self) -> bool:
        return self._run_dir.outcome() is not None

    def draw(self) -> RenderableType:
        """Return the picture as it is now. A coordinator that does not answer is a part of it."""
        now, tail = time.monotonic(), self._tail
        tail.look()
        tail.look_at_loss()
        if now - self._goodput_at >= GOODPUT_S or self.is_over:
            self._goodput, self._goodput_at = share_out(self._run_dir.path, tail.events), now
        parts: list[RenderableType] = []
        try:
            status = job_status(self._run_dir, self._tls)
        except HoldfastError as error:
            parts.append(Text(str(error), style="yellow"))
        else:
            tail.note_step(status.step, now)
            parts += [self._head(status), _workers(status)]
        if self._goodput is not None:
            parts += [Text(line) for line in summarize(self._goodput)[1:3]]
        for incident in tail.incidents[-INCIDENTS:]:
            at = format_clock(incident.began_at)
            parts.append(Text(f"{at}  {incident.title}; {describe_cost(incident)}", "dim"))
        return Group(*parts)

    def _head(self, status: JobStatus) -> Text:
        rate, loss = self._tail.steps_per_s, self._tail.loss
        left_s = self._tail.estimate_left_s()
        parts = [
            f"step {status.step}",
            "- steps/s" if rate is None else f"{rate:.3g} steps/s",
            "loss -" if loss is None else f"loss {loss:.6g}",
            f"view {status.view}",
            "time left -" if left_s is None else describe_left(left_s),
            ", ".join(node.id + (" (silent)" if node.silent else "") for node in status.agents),
        ]
        return Text.assemble((status.state.value, "bold"), "  ", "  ".join(parts))


def _workers(status: JobStatus) -> Table:
    table = Table("worker", "node", "pid", "state", "step", "virtual ranks", box=None)
    for worker in status.workers:
        mark = " (leader)" if worker.id == status.leader and not status.group else ""
        state = Text(worker.state.value, COLOURS.get(worker.state, ""))
        ranks = " ".join(map(str, worker.virtual_ranks))
        numbers = f"{worker.id}{mark}", worker.agent, str(worker.pid)
        table.add_row(*numbers, state, str(worker.step), ranks)
    return table
