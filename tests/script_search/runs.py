"""Runs a composed script on 1 worker, on 2, and on 2 with a death and a return; judges it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.job import Job
from script_search.compose import Script, compose
from script_search.habit import Truth
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

GUARD_STEPS = 8  # --fingerprint-steps and --repeat-steps
VIRTUAL = 4
RETURN_ROUNDS = 300  # rounds of the control plane in which a worker must return
RUN_S = 100.0  # bounds a hang
SETTINGS = {
    "workers.virtual": VIRTUAL,
    "silent_errors.fingerprint_steps": GUARD_STEPS,
    "silent_errors.repeat_steps": GUARD_STEPS,
}
RUNS = (("1 worker", 1, False), ("2 workers", 2, False), ("a death and a return", 2, True))
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Describes a run: the digest at its end, or why it was refused, and events about the script.

    If workers of the run end with different states, `digest` holds all of theirs.
    """

    name: str
    digest: str = ""
    refused: str = ""
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Describes the runs of one script, and the class in which it is counted."""

    seed: int
    what: str
    truth: str
    verdict: str
    runs: tuple[Run, ...]


EXACT, TOLD, NAMED, VAGUE, BLAMED, SILENT, FALSE, CRASH = (
    "exact",
    "other bits, an event names the habit",
    "refused, names the habit",
    "refused, but vaguely",
    "refused, blames a machine",
    "SILENTLY WRONG",
    "FALSE REFUSAL",
    "ended otherwise",
)
VERDICTS = (EXACT, TOLD, NAMED, VAGUE, BLAMED, SILENT, FALSE, CRASH)
_DEPENDS = "the result depends on the workers"
_REFUSALS = ("UserError", "StateMismatch", "WorldError")
_BLAME = ("wrongly", "its machine computes wrongly, or", "is not that of the others")


def judge(script: Script, runs: tuple[Run, ...]) -> str:
    """Return the class that a script is counted in."""
    verdict = _judge_ends(script, runs)
    told = [text for run in runs for text in run.events if _DEPENDS in text]
    if verdict == SILENT and any(name in text for name in script.names for text in told):
        return TOLD
    return verdict


def _judge_ends(script: Script, runs: tuple[Run, ...]) -> str:
    refused = [run for run in runs if run.refused]
    digests = {run.digest for run in runs if not run.refused}
    if any(" and " in digest for digest in digests):
        return SILENT
    if not refused:
        return EXACT if len(digests) == 1 else SILENT
    if len(digests) > 1:
        return SILENT
    if any(run.refused.partition(":")[0] not in _REFUSALS for run in refused):
        return CRASH
    if script.truth is Truth.HARMLESS:
        return FALSE
    said = " / ".join(run.refused for run in refused)
    if any(name in said for name in script.names):
        return NAMED
    return BLAMED if any(text in said for text in _BLAME) else VAGUE


def examine(script: Script, folder: Path, *, processes: bool = False) -> Result:
    """Run a script three times, in threads or in processes of its own."""
    run = _in_processes if processes or script.needs_processes else _in_threads
    runs = []
    for name, workers, dies in RUNS:
        place = folder / f"{script.seed}-{len(runs)}"
        place.mkdir(parents=True)
        runs.append(run(script, name, workers, place, script.kill_step if dies else None))
    found = tuple(runs)
    what = "; ".join(each.what for each in script.habits)
    return Result(
        seed=script.seed,
        what=what,
        truth=script.truth.value,
        verdict=judge(script, found),
        runs=found,
    )


def examine_all(seeds: Sequence[int], *, processes: bool = False) -> list[Result]:
    """Examine the scripts of these seeds."""
    with quiet() as folder:
        return [examine(compose(seed), folder, processes=processes) for seed in seeds]


# ---------------------------------------------------------------- in threads


def _in_threads(script: Script, name: str, workers: int, place: Path, kill_step: int | None) -> Run:
    path = place / "train.py"
    path.write_text(script.text)
    code = compile(script.text, path, "exec")  # Python 3.11 may fail where several threads do this
    ends: dict[int, str] = {}
    cluster: ThreadCluster

    def body(job: Job, me: ThreadWorker) -> None:
        def boundary(step: int) -> None:
            if kill_step is None:
                return
            if (me.worker, me.incarnation, step) == (1, 1, kill_step):
                me.die()
            elif me.worker != 1 and step > kill_step:
                _await_return(cluster, job)

        def report(model: Any) -> None:
            job._loops.end_open_loop()
            job._loops.wait_for_others()
            ends[me.worker] = digest(model)

        module = _module(path)
        vars(module).update(join=lambda: job, boundary=boundary, report=report, FOLDER=place)
        exec(code, vars(module))  # noqa: S102 - the script was composed here

    spec = with_settings(SPEC, {"workers.nproc": workers, **SETTINGS})
    cluster = ThreadCluster(spec, body)
    try:
        outcome = cluster.run()
    except AssertionError as error:
        return Run(name=name, refused=f"AssertionError: {error}")
    events = tuple(text for kind, text in cluster.events if kind in ("script", "wrong"))
    if outcome:
        errors = [e for e in cluster.errors if isinstance(e, UserError)] or cluster.errors
        said = " / ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in errors)) or outcome
        return Run(name=name, refused=said, events=events)
    return Run(name=name, digest=" and ".join(sorted(set(ends.values()))), events=events)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"composed{next(_numbers)}", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def _await_return(cluster: ThreadCluster, job: Job) -> None:
    """Wait until the worker that died is a member again, or about to become one."""
    driver = job._driver
    for _ in range(RETURN_ROUNDS):
        view = driver.view
        returned = view is not None and any(
            m.worker == 1 and m.incarnation > 1 for m in view.members
        )
        newest = cluster.workers[WorkerId(1)]
        gone = newest.incarnation > 2 or (newest.incarnation > 1 and not newest.alive)
        if driver.pending or returned or gone:
            return
        cluster.pass_rounds(1)


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all values in a model's state."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- in processes

_HEAD = """
import hashlib as _hashlib, os as _os, pathlib as _pathlib, signal as _signal, time as _time
import holdfast as _holdfast
FOLDER = _pathlib.Path({folder!r})
_KILL = {kill!r}
_names = ("HOLDFAST_WORKER", "0"), ("HOLDFAST_INCARNATION", "1")
_me = tuple(int(_os.environ.get(*each)) for each in _names)

def join():
    global _job
    _job = _holdfast.join()
    return _job

def boundary(step):
    if _KILL is None:
        return
    if _me == (1, 1) and step == _KILL:
        _os.kill(_os.getpid(), _signal.SIGKILL)
    until = _time.monotonic() + 30
    while _me[0] != 1 and step > _KILL and _time.monotonic() < until:
        view = _job._driver.view
        back = view is not None and any(m.worker == 1 and m.incarnation > 1 for m in view.members)
        if back or _job._driver.pending or (FOLDER / "returned").exists():
            (FOLDER / "returned").touch()
            return
        _time.sleep(0.02)

def report(model):
    found = _hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    print("DIGEST", found.hexdigest()[:16], flush=True)
"""


def _in_processes(
    script: Script, name: str, workers: int, place: Path, kill_step: int | None
) -> Run:
    path = place / "train.py"
    path.write_text(_HEAD.format(folder=str(place), kill=kill_step) + script.text)
    options = ["--nproc", str(workers), "--virtual", str(VIRTUAL)]
    options += ["--fingerprint-steps", str(GUARD_STEPS), "--repeat-steps", str(GUARD_STEPS)]
    with LocalRun(place / "run", options, [str(path)], bound=True) as run:
        code = run.wait(RUN_S)
        events = tuple(e["text"] for e in run.events() if e["kind"] in ("script", "wrong"))
        found = {line.split()[-1] for line in run.out if "DIGEST" in line}
        outcome = run.run_dir.outcome() or "\n".join(run.err[-8:])
    if code:
        kind = "" if "Traceback" in outcome else "UserError: "
        return Run(name=name, refused=kind + outcome, events=events)
    return Run(name=name, digest=" and ".join(sorted(found)), events=events)


@contextlib.contextmanager
def quiet() -> Iterator[Path]:
    """Give a folder for runs, and keep tracebacks of refused scripts out of the terminal."""
    logging.disable(logging.CRITICAL)
    before = sys.unraisablehook, threading.excepthook
    threading.excepthook = lambda arguments: None
    with tempfile.TemporaryDirectory(prefix="script-search-") as folder:
        try:
            yield Path(folder)
        finally:
            sys.unraisablehook, threading.excepthook = before
            logging.disable(logging.NOTSET)
