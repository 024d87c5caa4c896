"""A worker that joins a job with a large state: how long it takes, and the stall of the rest.

One of two workers is killed, again and again; all settings are the defaults. It prints the
seconds from the start of its successor to its membership, by stage, and by how much the
survivor's longest gap between two commits, while the worker is fed and joins, exceeds the median.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from recovery import lines

from holdfast.engine.runtime.local_run import LocalRun, strike

UNHURRIED_S = 300.0
STEADY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeJoin:
    """Seconds of one join, counted from the start of the new process.

    `ordered`: when the other workers began to feed it. `fed_for`: from then to its membership.
    """

    ordered_s: float
    joined_s: float
    longest_s: float  # the survivor's longest gap, from the order until shortly after the join
    usual_s: float
    steps: int  # steps of the job from the order to the membership

    @property
    def over_s(self) -> float:
        return self.longest_s - self.usual_s


def one_join(run: LocalRun, kills: int) -> LargeJoin:
    """Kill worker 1, and watch its successor become a member."""
    members = run.until_members(2, UNHURRIED_S)
    begun = max((x.step for x in lines(run)), default=0)

    def steps() -> int:
        return max((x.step for x in lines(run)), default=0)

    run.until(lambda: steps() > begun + STEADY_STEPS, UNHURRIED_S, "some steps")
    strike(members[1])
    run.until(lambda: run.members().get(1, members[1]) != members[1], UNHURRIED_S, "the new worker")
    pid = run.members()[1]
    joined_step = steps()
    run.until(lambda: steps() > joined_step + STEADY_STEPS, UNHURRIED_S, "steps after the join")
    began = started_at(pid)
    ordered = [e["time"] for e in run.events("join") if "receives the state" in e["text"]]
    joined = [e["time"] for e in run.events("view") if e["text"].endswith("worker 1 joins")]
    assert len(joined) == kills, "each new worker joins once"
    offset = time.time() - time.monotonic()
    at = {x.step: x.at + offset for x in lines(run) if x.worker == 0}
    gaps = {s: at[s] - at[s - 1] for s in at if s - 1 in at}
    since = ordered[-1] if len(ordered) == kills else joined[-1]
    during = {s: gap for s, gap in gaps.items() if at[s] > since}
    for s, gap in during.items():
        print(f"    step {s} ended {at[s] - began:.2f} s after the start, gap {gap:.3f} s")
    return LargeJoin(
        ordered_s=since - began,
        joined_s=joined[-1] - began,
        longest_s=max(during.values()),
        usual_s=statistics.median(during.values()),
        steps=sum(since < at[s] <= joined[-1] for s in during),
    )


def started_at(pid: int) -> float:
    """Return when a process started, as time.time() counts."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(words[19]) / os.sysconf("SC_CLK_TCK")


def measure(size_mb: int, joins: int) -> list[LargeJoin]:
    """Measure joins to a job of two workers with a state of `megabytes` MB."""
    script = str(Path(__file__).with_name("joining_worker.py"))
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalRun(Path(folder) / "run", ["--nproc", "2"], [script, str(size_mb), "100000"]) as run,
    ):
        found = []
        for kills in itertools.count(1):
            found.append(one_join(run, kills))
            print(f"  {size_mb} MB, join {kills}: {found[-1]}", flush=True)
            if kills == joins:
                return found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1200, metavar="MB")
    parser.add_argument("--joins", type=int, default=1)
    options = parser.parse_args()
    found = measure(options.size, options.joins)
    joined = statistics.median(each.joined_s for each in found)
    over = max(each.over_s for each in found)
    print(f"{joined:.1f} s from start to membership; longest gap {over:+.3f} s over the usual one")


if __name__ == "__main__":
    main()
