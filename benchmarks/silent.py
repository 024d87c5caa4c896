"""Wrong bits in running jobs: how many are found, the blamed workers, and the final digest.

Each job of four workers meets many injections, one at a time, at steps so far apart that each event
of the job's event log belongs to one of them. An injection counts if it has struck.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.runtime.local_run import LocalRun

RUN_S = 1200.0
WORKERS = 4
TASK_S = 0.003
SPARE_STEPS = 40  # steps at the end of a job, in which the last injection must be found
APART_LIGHT, APART_HEAVY = 4, 200  # steps: no process is replaced for the light ones
KINDS = {
    "gradient": "flip gradient",
    "received": "flip received",
    "NaN": "poison nan",
    "Inf": "poison inf",
    "parameter": "flip parameter",
    "optimizer": "flip optimizer",
    "arithmetic": "multiply wrongly",
}
LIGHT = ("gradient", "received", "NaN", "Inf")
AUDITED = ("--audit", "1.0", "--fingerprint-steps", "8")
SAMPLED = ("--audit", "0.05", "--fingerprint-steps", "16", "--save-every", "25")


@dataclass(slots=True)
class Found:
    """Results of one kind. `latencies`: steps until found. `jobs_right`: with equal bits."""

    injected: int = 0
    located: int = 0
    latencies: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Table:
    kinds: dict[str, Found] = field(default_factory=dict)
    jobs: int = 0
    jobs_right: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    kind: str
    worker: int
    step: int

    @property
    def line(self) -> str:
        until = self.step + 12 if self.kind == "arithmetic" else self.step
        return f"worker {self.worker} steps {self.step}-{until} {KINDS[self.kind]}"


def audited(per_job: dict[str, int], jobs: int) -> Table:
    """Measure with everything computed twice: no wrong value is ever used."""
    return _measure(per_job, jobs, AUDITED, stored=False)


def sampled(per_job: dict[str, int], jobs: int) -> Table:
    """Measure with a share computed twice; a late finding takes the job back to a checkpoint."""
    return _measure(per_job, jobs, SAMPLED, stored=True)


def _measure(per_job: dict[str, int], jobs: int, flags: Sequence[str], stored: bool) -> Table:
    table = Table(kinds={kind: Found() for kind in per_job})
    for number in range(jobs):
        injections = _draw(per_job, random.Random(f"silent {number}"))
        steps = injections[-1].step + SPARE_STEPS + (APART_HEAVY if stored else 0)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            store = ("--store", str(folder / "store")) if stored else ()
            events, digest = _run(folder, steps, (*flags, *store), injections)
            struck = {path.name for path in (folder / "run" / "faults").iterdir()}
        with tempfile.TemporaryDirectory() as name:
            _, undisturbed = _run(Path(name), steps, (), (), workers=1, task_s=0.0)
        table.jobs += 1
        table.jobs_right += digest == undisturbed
        _count(table, [i for i in injections if _has_struck(i, struck)], events, steps)
    return table


def _draw(per_job: dict[str, int], dice: random.Random) -> list[Injection]:
    last = "arithmetic"  # a worker that computes wrongly again and again is left out for minutes
    kinds = [kind for kind, count in per_job.items() for _ in range(count) if kind != last]
    dice.shuffle(kinds)
    hosts = [dice.randrange(WORKERS) for _ in kinds]
    kinds += [last] * per_job.get(last, 0)
    hosts += range(per_job.get(last, 0))
    found, step = [], 20
    for kind, worker in zip(kinds, hosts, strict=True):
        found.append(Injection(kind=kind, worker=worker, step=step))
        step += APART_LIGHT if kind in LIGHT else APART_HEAVY
    return found


def _run(
    folder: Path,
    steps: int,
    flags: Sequence[str],
    injections: Sequence[Injection],
    workers: int = WORKERS,
    task_s: float = TASK_S,
) -> tuple[list[str], str]:
    """Return the event log's texts about mistakes, and the digest of the model."""
    script, out = Path(__file__).with_name("silent_worker.py"), folder / "digest"
    options = ["--nproc", str(workers), "--virtual", str(WORKERS), *flags]
    if injections:
        faults = folder / "faults.txt"
        faults.write_text("\n".join(injection.line for injection in injections))
        options += ["--faults", str(faults)]
    command = [str(script), str(steps), str(task_s), str(out), str(1 << 30)]
    with LocalRun(folder / "run", options, command) as run:
        code = run.wait(RUN_S)
        if code != 0:
            raise RuntimeError(run.log())
        return [event["text"] for event in run.events("wrong")], out.read_text()


def _has_struck(injection: Injection, struck: set[str]) -> bool:
    action, _, target = KINDS[injection.kind].partition(" ")
    if action == "multiply":
        return True
    target = target if action == "flip" else ""
    return f"worker-{injection.worker}-step-{injection.step}-{action}-{target}" in struck


def _count(
    table: Table, injections: Sequence[Injection], events: Sequence[str], steps: int
) -> None:
    ends = [injection.step for injection in injections[1:]] + [steps]
    said = [(int(s[1]), text) for text in events if (s := re.search(r"step (\d+)", text))]
    for injection, end in zip(injections, ends, strict=True):
        found = table.kinds[injection.kind]
        found.injected += 1
        mine = [(step, text) for step, text in said if injection.step <= step < end]
        if mine:
            found.latencies.append(min(step for step, _ in mine) - injection.step)
            found.located += any(f"worker {injection.worker} " in text for _, text in mine)
