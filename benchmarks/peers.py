"""`make bench-peers`: the same training and the same faults with Holdfast and with its peers.

Each run is one launch that trains one epoch, undisturbed or with one fault; the frameworks take
turns. The results stay in benchmarks/out/peers, and benchmarks/PEERS.md is written from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import peers_launch
import peers_sheet
from peers_launch import Fault, PeerRun, RunResult

OUT = Path(__file__).parent / "out" / "peers"
SHEET = Path(__file__).with_name("PEERS.md")
STEPS = 100
UNDISTURBED = 2


def planned_runs(kills: int, freezes: int) -> list[tuple[str, Fault | None, int]]:
    """Return the runs in order: framework, fault, and a number among those of its kind.

    Two kills strike each framework without the change that we made to it in its other runs.
    """
    struck = [
        peers_launch.planned_faults(signal.SIGKILL, kills, STEPS),
        [None] * UNDISTURBED,
        peers_launch.planned_faults(signal.SIGSTOP, freezes, STEPS),
    ]
    rounds = [
        (kind[i], i) for i in range(max(map(len, struck))) for kind in struck if i < len(kind)
    ]
    return [
        (framework, fault, i)
        for fault, i in rounds
        for framework in peers_launch.FRAMEWORKS
        if framework not in peers_launch.PARTIAL or (fault and fault.kind == "kill" and i < 2)
    ]


def run_name(framework: str, fault: Fault | None, i: int) -> str:
    """Return the name of a run's folder."""
    kind = "undisturbed" if fault is None else fault.kind
    return f"{kind}-{i}-{framework.replace(', ', '-').replace(' ', '-').lower()}"


def run_once(framework: str, fault: Fault | None, name: str) -> RunResult:
    """Do one run, and keep its result and its logs."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    load = os.getloadavg()[0]
    with PeerRun(framework, folder, STEPS) as run:
        result = dataclasses.replace(run.train(fault), load=load)
    text = json.dumps(dataclasses.asdict(result))
    (OUT / f"{name}.json").write_text(text)
    return result


def kept_results() -> list[RunResult]:
    """Return the results of all runs so far."""
    found = []
    for path in sorted(OUT.glob("*.json")):
        values = json.loads(path.read_text())
        if values["fault"] is not None:
            values["fault"] = Fault(**values["fault"])
        found.append(RunResult(**values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="kills of each framework")
    parser.add_argument("--freezes", type=int, default=3, help="freezes of each framework")
    parser.add_argument("--resume", action="store_true", help="keep the runs there are")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="leave out all other frameworks")
    parser.add_argument("--sheet", action="store_true", help="only write the sheet again")
    options = parser.parse_args()
    if not options.sheet and not options.resume:
        shutil.rmtree(OUT, ignore_errors=True)
    for framework, fault, i in planned_runs(options.kills, options.freezes):
        name = run_name(framework, fault, i)
        if options.only and framework not in options.only:
            continue
        if options.sheet or (OUT / f"{name}.json").exists():
            continue
        began = time.monotonic()
        result = run_once(framework, fault, name)
        print(f"{name}: {time.monotonic() - began:.0f} s {result.error}", flush=True)
    results = kept_results()
    if not results:
        sys.exit(f"no results in {OUT}: run without --sheet first")
    versions = peers_sheet.peer_versions(peers_launch.PEERS / "python")
    lines = [*peers_sheet.head(results, versions), *peers_sheet.lines(results)]
    SHEET.write_text("\n".join(lines) + "\n")
    print(f"written: {SHEET}")


if __name__ == "__main__":
    main()
