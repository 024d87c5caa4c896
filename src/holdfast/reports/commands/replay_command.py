"""`holdfast replay RUN --step N` computes steps again, and compares them with the run's records.

It prepares a job of one worker, from a checkpoint of the run. The run is only read: the new job's
checkpoints go to a fork of the store, which is thrown away with the new job's run directory. Exit
status: 0 all wanted steps are the same, 1 one of them differs, 2 they cannot be computed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import HoldfastError, UserError, WorldError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec, with_settings
from holdfast.engine.net.secret import SECRET_BYTES_MIN
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.ledger import StepLine, Uses
from holdfast.engine.records.step_records import (
    RunSteps,
    StepDifference,
    find_difference,
    read_steps,
)
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.temporary import temporary_folder
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import check_exists, fork_store, open_storage

POLL_S = 0.2
NAMES = ("the run", "the replay")
ALONE = {
    "workers.nproc": 1,
    "workers.spread": 1,
    "workers.spares": 0,
    "workers.hot_spares": False,
    "workers.min": 1,
    "nodes.min": 1,
    "nodes.max": 1,
    "nodes.election": "",
    "stragglers.backup": 0,
    "memory.redundancy": "none",
    "servers.replicas": 1,
}


@dataclass(slots=True)
class Replayed:
    """Lists the steps that were computed again, and the first difference of each replay."""

    steps: list[int] = field(default_factory=list)
    differences: list[StepDifference] = field(default_factory=list)
    entries: dict[int, StepLine] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast replay`."""
    options = parser().parse_args(argv)
    recorded = read_steps(options.run_dir)
    for step in options.step:
        check_step(recorded, step)
    vrank, ranks = options.vrank, RunDir(options.run_dir).spec().virtual_ranks
    if vrank is not None and not 0 <= vrank < ranks:
        raise UserError(f"--vrank {vrank}: the job has virtual ranks 0 to {ranks - 1}")
    found = replay(options.run_dir, recorded, options.step, options.timeout, quiet=options.json)
    tasks = []
    if vrank is not None:
        tasks = [describe_task(found.entries.get(step), vrank) for step in options.step]
    return conclude(found, as_json=options.json, after=tasks)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast replay",
        description="Compute committed steps of a run again, on one worker of this machine, from "
        "the newest checkpoint before them or from the beginning. Compare samples, losses, values "
        "and digests of the state, of gradients and of their sum with those that the run has "
        "recorded. The run is only read.",
    )
    found.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    found.add_argument(
        "--step", type=int, action="append", required=True, metavar="N", help="may be repeated"
    )
    found.add_argument(
        "--vrank", type=int, metavar="R", help="print what this virtual rank's task computed"
    )
    add_common(found)
    return found


def conclude(
    found: Replayed,
    *,
    as_json: bool,
    about: Mapping[str, object] = MappingProxyType({}),
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> int:
    """Print the result; returns the exit status.

    `about`: more for JSON. `before`, `after`: more lines for people.
    """
    if as_json:
        print_plain(json.dumps({**about, **to_dict(found)}, indent=2))
    else:
        print_plain("\n".join([*before, render(found), *after]))
    return 1 if found.differences else 0


def add_common(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="give up after this long (default 3600)",
    )
    found.add_argument("--json", action="store_true", help="print JSON, for scripts")


def check_step(recorded: RunSteps, step: int) -> None:
    """Raise UserError for a step that the run's ledger does not have."""
    if step not in recorded.steps:
        steps = sorted(recorded.steps)
        there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise UserError(f"the ledger of {recorded.name} has no step {step}: {there}")


def replay(
    path: Path, recorded: RunSteps, wanted: Sequence[int], timeout_s: float, *, quiet: bool
) -> Replayed:
    """Compute the wanted steps again, and all between these and a checkpoint. UserError."""
    if not 0 < timeout_s < float("inf"):
        raise UserError(f"--timeout {timeout_s:g}: give a number of seconds above 0")
    spec, found = RunDir(path).spec(), Replayed()
    last: dict[int, int] = {}  # by the checkpoint to begin from: the last wanted step
    for step, begin in find_beginnings(spec, wanted).items():
        last[begin] = max(last.get(begin, 0), step)
    until = time.monotonic() + timeout_s
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        temporary_folder("replay-") as place,
        Progress(
            *columns, console=PlainConsole(stderr=True), disable=quiet or not sys.stderr.isatty()
        ) as bar,
    ):
        for begin, end in sorted(last.items()):
            bar.add_task(f"steps {begin} to {end}")
            run_dir = prepare_replay(spec, begin, place / f"from-{begin}")
            again = _run(run_dir.path, end, until)
            _compare(recorded, again, range(begin, end + 1), found)
    return found


def _run(path: Path, end: int, until: float) -> RunSteps:
    """Run a prepared job until it has committed step `end`; returns its steps. UserError."""
    start = partial(subprocess.Popen, env={**os.environ, "HOLDFAST_REPLAY": "1"})
    command = ["resume", str(path), "--plain"]
    with LocalRun(path, [], [], popen=start, command=command, bound=True) as run:
        while True:
            ended, at = not run.is_running(), _step_of(run)
            if ended or at >= end:  # the ledger is long: it is not read before
                found = _steps_so_far(path)
                if end in found.steps:
                    return found
            if ended:
                told = "\n".join(run.err[-5:])
                raise UserError(f"the replay ended before step {end}:\n{told}")
            if time.monotonic() > until:
                raise UserError(
                    f"the replay was at step {at} of {end} when the time was over: give a longer "
                    "--timeout"
                )
            time.sleep(POLL_S)


def _step_of(run: LocalRun) -> int:
    """Return the step of a job by its status; -1 while no coordinator answers."""
    try:
        return int(run.status()["step"])
    except HoldfastError:
        return -1


def _steps_so_far(path: Path) -> RunSteps:
    try:
        return read_steps(path)
    except UserError:  # there is no ledger yet
        return RunSteps(str(path))


def _compare(recorded: RunSteps, again: RunSteps, steps: range, found: Replayed) -> None:
    """Compare these steps; after the first difference the later ones differ as well."""
    for step in steps:
        if step not in recorded.steps or step not in again.steps:
            continue
        ours, theirs = recorded.steps[step], again.steps[step]
        found.entries[step] = theirs
        if _was_dropped(ours):
            raise UserError(
                f"in step {step} the work of late workers was dropped (--backup), and which work "
                "that was cannot be computed again: choose steps before it"
            )
        difference = find_difference(ours, theirs, NAMES)
        if difference is not None:
            found.differences.append(difference)
            return
        found.steps.append(step)


def _was_dropped(line: StepLine) -> bool:
    pairs = zip(line.counts, line.digests, strict=True)
    return line.place.uses is not Uses.NO_SAMPLES and any(
        not count and not int(digest, 16) for count, digest in pairs
    )


def to_dict(found: Replayed) -> dict[str, Any]:
    """Return the result for JSON."""
    return {
        "equal": not found.differences,
        "steps": found.steps,
        "differences": [asdict(each) for each in found.differences],
    }


def render(found: Replayed) -> str:
    """Return the result for people."""
    lines = []
    if found.steps:
        count = f"{len(found.steps)} step{'s' * (len(found.steps) > 1)}"
        lines.append(f"{count} computed again, with the recorded result: {_spans(found.steps)}")
    lines += [f"NOT THE SAME: {each.text}" for each in found.differences]
    return "\n".join(lines)


def describe_task(line: StepLine | None, vrank: int) -> str:
    """Return the results of a virtual rank's task of a step, in one line."""
    if line is None:
        return f"virtual rank {vrank} was not computed"
    loss = repr(line.all_losses()[vrank]) if line.losses else "unknown"
    gradients = line.all_gradients()
    gradient = f", gradient (digest {gradients[vrank]})" if gradients else ""
    return (
        f"step {line.step}, virtual rank {vrank}: {line.counts[vrank]} samples (digest "
        f"{line.digests[vrank]}), loss {loss}{gradient}"
    )


def _spans(steps: Sequence[int]) -> str:
    """Return numbers in growing order as spans, such as "3-7, 20"."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def find_beginnings(spec: JobSpec, wanted: Iterable[int]) -> dict[int, int]:
    """Return for each step the newest checkpoint from which it can be computed, 0 for none.

    UserError if the store cannot be read.
    """
    stored: list[int] = []
    if store := spec.checkpoints.store:
        check_exists(store)
        try:
            stored = Checkpoints(open_storage(store)).steps()
        except WorldError as error:
            raise UserError(f"the run's store {store} cannot be read: {error}") from None
    return {step: max((s for s in stored if s <= step), default=0) for step in wanted}


def prepare_replay(spec: JobSpec, begin: int, path: Path) -> RunDir:
    """Make a run directory at `path` for a job that begins at step `begin` of another one.

    UserError if that is a job which cannot be computed by one worker.
    """
    if spec.compat.enabled:
        raise UserError("a run with --compat has no steps that could be computed again")
    forked = fork_store(spec.checkpoints.store, begin, path / "store") if begin else ""
    alone = with_settings(
        spec,
        {
            **ALONE,
            "workers.virtual": spec.virtual_ranks,
            "checkpoints.store": forked,
            "servers.count": min(spec.servers.count, 1),
        },
    )
    alone = dataclasses.replace(alone, job=secrets.token_hex(JOB_BYTES_MAX // 2))
    found = RunDir(path)
    found.create(alone, secrets.token_bytes(SECRET_BYTES_MIN))
    asyncio.run(_write_record(found, begin))
    return found


async def _write_record(run_dir: RunDir, begin: int) -> None:
    """Record the checkpoint from which the job begins."""
    journal = FileJournal(run_dir.journal)
    loaded = await journal.load()
    await journal.save(JobRecord(term=loaded.term, saved=(begin,) if begin else ()))
    journal.close()
