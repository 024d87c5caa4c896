"""Plays failures on the real machines, and compares the useful time with the closed form's.

    python benchmarks/real_machines.py            # print the table: some 10 minutes
    python benchmarks/real_machines.py --write    # and draw it in PAPERS.md

The shipped coordinator, agents and workers run in the simulator. What a failure costs is measured
there, not assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from random import Random

from network_model import replace_section
from rich.progress import track

from holdfast.plan.failure_tables import DAY_S
from holdfast.plan.machines import Trial, assume_recovery, run_trial
from holdfast.plan.recovery import predict
from holdfast.plan.weeks import simulate, spread_of

PAGE = Path(__file__).with_name("PAPERS.md")
SEEDS = 8
SPAN_S = 28 * DAY_S
#: Jobs, and the number of failures that each of them lives through.
TRIALS = (
    (Trial(nodes=4, spare_nodes=1, tasks=4, mtbf_s=10_000.0), 40),
    (Trial(nodes=4, tasks=4, mtbf_s=3_000.0), 40),
    (Trial(nodes=8, spare_nodes=1, tasks=2, mtbf_s=2_000.0), 40),
    (Trial(nodes=16, spare_nodes=2, tasks=4, mtbf_s=1_000.0, opening_s=10.0), 40),
    (Trial(nodes=64, spare_nodes=2, tasks=2, mtbf_s=3_000.0, opening_s=4.0), 20),
)


def try_out(trial: Trial, failures: int) -> str:
    """Return the row of a job."""
    found = run_trial(trial, failures)
    recovery = assume_recovery(trial, found)
    weeks = [simulate(recovery, SPAN_S, Random(seed)) for seed in range(SEEDS)]
    values = (
        f"{trial.nodes}",
        f"{trial.tasks}",
        f"{trial.spare_nodes}",
        f"{found.span_s / found.failures:,.0f} s",
        f"{trial.opening_s:.0f} s",
        f"{found.failures}",
        f"{found.events:,}",
        f"{found.ettr:.2%}",
        f"{predict(recovery).ettr:.2%}",
        f"{spread_of(weeks)[0]:.2%}",
    )
    return f"| {' | '.join(values)} |"


def draw(rows: Iterable[str]) -> str:
    """Return the table."""
    head = (
        "| nodes | tasks | spares | mean between failures | opening | failures | events "
        "| real machines | closed form | weeks that are played |"
    )
    return "\n".join((head, "|---" * 10 + "|", *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="draw the table in PAPERS.md")
    options = parser.parse_args()
    table = draw([try_out(trial, failures) for trial, failures in track(TRIALS, "trials")])
    print(table)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replace_section(text, "real machines", table), encoding="utf-8")


if __name__ == "__main__":
    main()
