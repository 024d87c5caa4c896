"""The memory tier: its cost in each step and its savings, by redundancy and by kind of loss.

Each node is an agent of its own with one worker, all on this machine. The script is the one of
`holdfast demo`, a small GPT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.redundancy import read_redundancy
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.demo import gpt
from labs.local_nodes import LocalNodes, names

SCRIPT = str(gpt.__file__)
PACED = str(Path(__file__).with_name("paced_worker.py"))
UNHURRIED_S = 300.0
ENDLESS = 100_000  # steps, of a job that ends on demand
LATER = 100  # steps before the first loss
TICKS = os.sysconf("SC_CLK_TCK")
REDUNDANCIES = ("none", "replicate:2", "rs:2+1", "rs:4+2")
NODES = 6
ROUNDS = 5
COSTS = ("none", "replicate:2", "rs:2+1")
STEPS_TIMED = 200


@contextlib.contextmanager
def job(
    redundancy: str,
    nodes: int,
    steps: int,
    virtual: int,
    *options: str,
    script: Sequence[str] = (),
    rest_s: float = 0.0,
) -> Iterator[tuple[LocalRun, LocalNodes]]:
    flags = ["--nproc", "1", "--virtual", str(virtual), "--nodes-min", str(nodes)]
    flags += ["--nodes-max", str(2 * nodes), "--redundancy", redundancy, *options]
    words = [PACED, str(rest_s), SCRIPT] if rest_s else [SCRIPT]
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalRun(Path(folder) / "run", flags, [*words, "--steps", str(steps), *script]) as run,
        LocalNodes(run) as others,
    ):
        run.until(run.run_dir.coordinator.exists, UNHURRIED_S, "the coordinator listens")
        for name in names(nodes):
            others.add(name)
        run.until_members(nodes, UNHURRIED_S)
        yield run, others


def step_of(run: LocalRun) -> int:
    with contextlib.suppress(HoldfastError):
        return int(run.status()["step"])
    return -1


def until_step(run: LocalRun, step: int) -> float:
    run.until(lambda: step_of(run) >= step, UNHURRIED_S, f"step {step}")
    return time.monotonic()


# ---------------------------------------------------------------- what it costs


def cpu_s(run: LocalRun) -> float:
    """Return the processor time of all processes of the run so far."""
    total = 0
    for pid in [run.pid, *run.leftovers()]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
    return total / TICKS


def step_s(redundancy: str, every: int = 20) -> tuple[float, float]:
    """Return wall and processor time of a step of 4 workers on 4 nodes."""
    steps = STEPS_TIMED + 60
    with job(redundancy, 4, steps, 4, "--protect-every", str(every)) as (run, _):
        began, spent = until_step(run, 40), cpu_s(run)
        first = step_of(run)
        ended, later = until_step(run, 40 + STEPS_TIMED), cpu_s(run)
        count = step_of(run) - first
        return (ended - began) / count, (later - spent) / count


def cost_lines(rounds: int = ROUNDS) -> Iterator[str]:
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in COSTS}
    for number in range(rounds):
        for redundancy in COSTS:
            found[redundancy].append(step_s(redundancy))
            wall, cpu = found[redundancy][-1]
            print(
                f"  {redundancy}, {number}: {wall * 1e3:.2f} ms, CPU {cpu * 1e3:.2f} ms", flush=True
            )
    yield "## What a step costs"
    yield ""
    yield "4 workers as 4 agents, a log of every step and a state every 20 steps, beside the same"
    yield f"job without, in turn; medians of {rounds} runs of {STEPS_TIMED} steps. Target: 1.05 of"
    yield "the wall time. CPU: of all processes of the run."
    yield ""
    yield "| redundancy | step | ratio | min .. max | CPU of a step | ratio |"
    yield "|---|---|---|---|---|---|"
    for redundancy in COSTS:
        walls = [wall for wall, _ in found[redundancy]]
        cpus = [cpu for _, cpu in found[redundancy]]
        ratios = [wall / none for wall, (none, _) in zip(walls, found["none"], strict=True)]
        more = [cpu / none for cpu, (_, none) in zip(cpus, found["none"], strict=True)]
        yield (
            f"| {redundancy} | {statistics.median(walls) * 1e3:.2f} ms "
            f"| **{statistics.median(ratios):.3f}** | {min(ratios):.2f} .. {max(ratios):.2f} "
            f"| {statistics.median(cpus) * 1e3:.1f} ms | {statistics.median(more):.3f} |"
        )


# ---------------------------------------------------------------- what it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Describes one loss of all workers, and of some nodes with their memory."""

    nodes: int
    view: int  # the view in which the job continued
    lost_at: int  # committed steps
    began: int  # steps after which the job continued
    recovery_s: float
    stored: int  # bytes, on all nodes
    moved_mb: float  # to each worker
    from_memory: bool


def lose(run: LocalRun, others: LocalNodes, here: Sequence[str], name: str, since: int = 0) -> Loss:
    """Kill all workers and some nodes, and have new nodes take their places.

    `since`: the view in which the job last began again, if it has.
    """
    status = run.status()
    stored = 0 if status["memory"] is None else int(status["memory"]["bytes"])
    seen = len(run.events("view"))
    told = len(run.events("memory"))
    for pid in run.members().values():
        strike(pid)
    for each in here:
        others.kill(each)
    struck_at = time.monotonic()
    run.until(lambda: len(run.events("view")) > seen, UNHURRIED_S, "a new view")
    view = run.events("view")[seen]
    until_step(run, int(view["step"]) + 1)
    took_s = time.monotonic() - struck_at
    lost_at = max(committed(run, since, int(view["view"])), int(status["step"]))
    for number in range(len(here)):
        others.add(f"{name}{number}")
    news = [event["text"] for event in run.events("memory")[told:]]
    moved = [float(m[1]) for text in news if (m := re.search(r"([\d.]+) MB to each", text))]
    return Loss(
        nodes=len(here),
        view=int(view["view"]),
        lost_at=lost_at,
        began=int(view["step"]),
        recovery_s=took_s,
        stored=stored,
        moved_mb=max(moved, default=0.0),
        from_memory="as the nodes' memory has it" in view["text"],
    )


def committed(run: LocalRun, since: int, before: int) -> int:
    """Return the steps that were committed in views from `since` up to `before`, by the ledger."""
    steps = [-1]
    for path in (run.run_dir.path / "ledger").iterdir():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that its writer did not finish
                entry = json.loads(line)
                if entry.get("kind") == "step" and since <= entry["view"] < before:
                    steps.append(entry["step"])
    return max(steps) + 1


def pattern_lines(losses: int = 2) -> Iterator[str]:
    yield f"## Losses, on {NODES} nodes"
    yield ""
    yield "All workers are killed at once, and some nodes with them (agents and their memory)."
    yield "Redone: committed steps that were computed again. Recovery: from the kill to the next"
    yield "committed step, the discovery of lost nodes included (a lease of 2.5 s). No store: what"
    yield "the memory does not hold begins from step 0."
    yield ""
    yield (
        "| redundancy | nodes lost | from | steps redone | stored on all nodes "
        "| moved to a worker | recovery |"
    )
    yield "|---|---|---|---|---|---|---|"
    for redundancy in REDUNDANCIES:
        for count in range(4):
            found = []
            with job(redundancy, NODES, 100_000, NODES, "--abandon-s", "10") as (run, others):
                rng = random.Random(f"{redundancy} {count}")
                here = names(NODES)
                for number in range(losses):
                    until_step(run, step_of(run) + 45)
                    chosen = rng.sample(here, count)
                    found.append(lose(run, others, chosen, f"new{number}-"))
                    here = [n for n in here if n not in chosen]
                    here += [f"new{number}-{n}" for n in range(count)]
                    run.until_members(NODES, UNHURRIED_S)
            print(f"  {redundancy}, {count} nodes: {found}", flush=True)
            yield pattern_row(redundancy, count, found)


def pattern_row(redundancy: str, count: int, found: Sequence[Loss]) -> str:
    redone = [loss.lost_at - loss.began for loss in found]
    whence = "memory" if all(loss.from_memory for loss in found) else "step 0"
    return (
        f"| {redundancy} | {count} | {whence} | {max(redone)} of {max(x.lost_at for x in found)} "
        f"| {found[0].stored / 1e6:.1f} MB | {found[0].moved_mb:.1f} MB "
        f"| {statistics.median(loss.recovery_s for loss in found):.2f} s |"
    )


# ---------------------------------------------------------------- sharded optimizers

LARGE = ("--width", "512", "--layers", "6", "--batch-size", "2", "--context", "32")
LARGE_PARAMETERS = 19.2e6
WARM, TIMED = 6, 20  # steps


def anonymous_mb(pid: int) -> float:
    """Return the memory of a process alone: no files, and no pieces of the state."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise HoldfastError(f"process {pid} does not say what memory it has")


def sharded(workers: int, *options: str) -> tuple[float, float, float]:
    """Return a worker's memory (MB), and wall and processor time of a step of a larger model."""
    with job("replicate:1", workers, ENDLESS, workers, *options, script=LARGE) as (run, _):
        began, spent = until_step(run, WARM), cpu_s(run)
        first = step_of(run)
        ended, later = until_step(run, WARM + TIMED), cpu_s(run)
        memory = statistics.median(anonymous_mb(pid) for pid in run.members().values())
        count = step_of(run) - first
        return memory, (ended - began) / count, (later - spent) / count


def optimizer_lines(rounds: int = ROUNDS) -> Iterator[str]:
    yield "## Sharded optimizers (ZeRO-1)"
    yield ""
    yield f"A GPT of {LARGE_PARAMETERS / 1e6:.1f} million parameters with AdamW, whose state takes"
    yield f"{8 * LARGE_PARAMETERS / 1e6:.0f} MB; a worker on each node, with `--shard-optimizer`"
    yield f"and without, in turn, {rounds} runs each of {TIMED} steps; medians. Memory: a worker's"
    yield "own, without files and pieces. Share: of the memory that can be saved, all but"
    yield "one N-th of the state."
    yield ""
    yield "| workers | memory | sharded | saved | share | step | CPU |"
    yield "|---|---|---|---|---|---|---|"
    for workers in (2, 4):
        whole, parts = [], []
        for _ in range(rounds):
            whole.append(sharded(workers))
            parts.append(sharded(workers, "--shard-optimizer"))
            print(f"  {workers} workers: {whole[-1]}, sharded {parts[-1]}", flush=True)
        memory, less = (statistics.median(m for m, _, _ in found) for found in (whole, parts))
        pairs = list(zip(whole, parts, strict=True))
        wall, cpu = (statistics.median(s[i] / w[i] for w, s in pairs) for i in (1, 2))
        most = 8 * LARGE_PARAMETERS / 1e6 * (1 - 1 / workers)
        yield (
            f"| {workers} | {memory:.0f} MB | {less:.0f} MB | {memory - less:.0f} MB "
            f"| {(memory - less) / most:.2f} | **{wall:.2f}** | {cpu:.2f} |"
        )


# ---------------------------------------------------------------- one worker on several nodes

FSDP = str(Path(__file__).resolve().parent.parent / "examples" / "fsdp.py")
TEAM = 3
SPREAD = ("--procs-per-worker", str(TEAM), "--nodes-per-worker", str(TEAM))


def spread_lines(losses: int = ROUNDS) -> Iterator[str]:
    yield f"## One FSDP worker on {TEAM} nodes"
    yield ""
    yield "No other worker holds a shard. One process is killed, or one node with its memory, whose"
    yield f"place a node takes that waits; medians of {losses}, from the kill to the next step."
    yield ""
    yield "| redundancy | lost | steps redone | recovery | min .. max |"
    yield "|---|---|---|---|---|"
    for redundancy in ("replicate:2", "rs:2+1"):
        for what in ("a process", "a node"):
            redone, took = spread_losses(redundancy, what == "a node", losses)
            print(f"  {redundancy}, {what}: {took}", flush=True)
            yield (
                f"| {redundancy} | {what} | {redone} | {statistics.median(took):.2f} s "
                f"| {min(took):.2f} .. {max(took):.2f} |"
            )


def spread_losses(redundancy: str, nodes: bool, losses: int) -> tuple[int, list[float]]:
    """Return the number of steps redone, and the duration of each recovery (s)."""
    flags = ["--nproc", "1", "--virtual", "4", "--nodes-min", str(TEAM), *SPREAD]
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalRun(
            Path(folder) / "run",
            [*flags, "--redundancy", redundancy, "--protect-every", "20"],
            [FSDP, "--steps", str(ENDLESS)],
        ) as run,
        LocalNodes(run) as others,
    ):
        run.until(run.run_dir.coordinator.exists, UNHURRIED_S, "the coordinator listens")
        for name in names(TEAM):
            others.add(name)
        run.until_members(1, UNHURRIED_S)
        last, redone, took = names(TEAM)[-1], 0, []
        waiting = [f"waits{number}" for number in range(losses if nodes else 0)]
        for waits in waiting:
            others.add(waits)
            until_told(run, waits)
        until_step(run, step_of(run) + 100)  # the workers have imported everything by then
        for _ in range(losses):
            until_step(run, step_of(run) + 10)
            seen, known = len(run.events("view")), step_of(run)
            struck_at = time.monotonic()
            if nodes:
                others.kill(last)
                last = waiting.pop(0)  # in the order in which they joined
            else:
                strike(next(iter(run.members().values())))
            view = next_view(run, seen)
            until_step(run, int(view["step"]) + 1)
            took.append(time.monotonic() - struck_at)
            lost_at = max(committed(run, 0, int(view["view"])), known)
            redone += max(lost_at - int(view["step"]), 0)
        return redone, took


def until_told(run: LocalRun, name: str) -> None:
    """Wait until a node's agent has printed its line."""

    def there() -> bool:
        with contextlib.suppress(HoldfastError):
            return name in [each["id"] for each in run.status()["agents"]]
        return False

    run.until(there, UNHURRIED_S, "a node that waits")


def next_view(run: LocalRun, seen: int) -> dict[str, Any]:
    """Wait for one more view than `seen`, and return its event."""
    run.until(lambda: len(run.events("view")) > seen, UNHURRIED_S, "a new view")
    return run.events("view")[seen]


# ---------------------------------------------------------------- at random

REST_S = 0.1  # after each step
SMALL = ("--width", "32", "--layers", "1", "--context", "16", "--batch-size", "2")


def random_lines(within: int = 100, beyond: int = 20, seed: int = 1) -> Iterator[str]:
    """Lose random nodes again and again, and compare the digests at the end."""
    rng = random.Random(seed)
    yield "## At random"
    yield ""
    yield "| redundancy | losses of all workers and | steps redone | equal digests |"
    yield "|---|---|---|---|"
    for redundancy in REDUNDANCIES[1:]:
        parity = read_redundancy(redundancy).parity
        share = (within // 3 + (redundancy == "rs:4+2") * (within % 3), beyond // 3 + 1)
        for count, least, most in ((share[0], 0, parity), (share[1], parity + 1, NODES - 1)):
            text = f"{count} x {least}" + (f" to {most} nodes" if most > least else " nodes")
            redone, equal = random_losses(redundancy, count, (least, most), rng)
            yield f"| {redundancy} | {text} | {redone} | {equal} |"


def random_losses(
    redundancy: str, count: int, bounds: tuple[int, int], rng: random.Random
) -> tuple[int, str]:
    """Return the number of steps redone, and whether the digest is the undisturbed job's."""
    redone = since = 0
    # The next loss may come before all new nodes have joined, but not before enough of them have.
    enough = min(read_redundancy(redundancy).pieces + 1, NODES)
    with (
        tempfile.TemporaryDirectory() as folder,
        random_job(redundancy, Path(folder) / "stop", "--abandon-s", "10") as (run, others),
    ):
        here = names(NODES)
        for number in range(count):
            until_step(run, step_of(run) + rng.randrange(2, 10))
            chosen = rng.sample(here, rng.randint(*bounds))
            loss = lose(run, others, chosen, f"new{number}-", since)
            since = since if loss.from_memory else loss.view
            redone += max(loss.lost_at - loss.began, 0)
            here = [n for n in here if n not in chosen]
            here += [f"new{number}-{n}" for n in range(len(chosen))]
            run.until_members(enough, UNHURRIED_S)
            print(f"  {redundancy}, loss {number}: {loss}", flush=True)
        run.until_members(NODES, UNHURRIED_S)
        last = step_of(run) + LATER
        end_at(last, Path(folder) / "stop")
        assert run.wait(UNHURRIED_S) == 0, run.log()
        digests = set(others.last_lines())
    with tempfile.TemporaryDirectory() as folder:
        end_at(last, Path(folder) / "stop")
        with random_job("none", Path(folder) / "stop", nodes=1) as (run, others):
            assert run.wait(20 * UNHURRIED_S) == 0, run.log()
            return redone, "yes" if run.out[-1] in digests else "NO"


@contextlib.contextmanager
def random_job(
    redundancy: str, stop: Path, *options: str, nodes: int = NODES
) -> Iterator[tuple[LocalRun, LocalNodes]]:
    """Run a job of a small model that ends at a step which is later written to a file.

    It rests after each step if there are several nodes, so that new ones soon join.
    """
    script, rest_s = (*SMALL, "--stop", str(stop)), REST_S if nodes > 1 else 0.0
    with job(redundancy, nodes, ENDLESS, NODES, *options, script=script, rest_s=rest_s) as both:
        yield both


def end_at(step: int, stop: Path) -> None:
    """Order a job to end at a step that it has not reached yet."""
    (stop.parent / "new").write_text(str(step))
    (stop.parent / "new").rename(stop)


def lines() -> Iterator[str]:
    yield from cost_lines()
    yield ""
    yield from pattern_lines()
    yield ""
    yield from optimizer_lines()
    yield ""
    yield from spread_lines()
    yield ""
    yield from random_lines()


MADE = {
    "cost": cost_lines,
    "patterns": pattern_lines,
    "optimizer": optimizer_lines,
    "spread": spread_lines,
    "random": random_lines,
    "all": lines,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=tuple(MADE))
    options = parser.parse_args()
    for line in MADE[options.what]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
