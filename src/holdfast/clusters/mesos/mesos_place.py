"""Carries out one order for a node in a task of Mesos, which knows no more than its name.

    python -m holdfast.clusters.mesos.mesos_place RUN_DIR NAME

The command and its environment, which may hold the job's secret, stay in the run directory: Mesos
shows the arguments of tasks to its users. The task ends with the ordered agent, and the agent with
the task.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.ray.ray_place import end_with, start
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.net.standard_streams import print_plain


def main(argv: list[str]) -> NoReturn:
    """Carry out the order. Exit status 1: it cannot be read here, for the printed reason."""
    run_dir, id_ = Path(argv[0]), PlacementId(argv[1])
    try:
        entry = OrderBook(run_dir / ORDERS).find(id_)
    except (HoldfastError, OSError) as error:
        sys.exit(f"holdfast: order {id_} cannot be read: {error}")
    if entry is None:
        sys.exit(
            f"holdfast: {run_dir} has no order {id_}: is it shared with {os.uname().nodename}?"
        )
    print_plain(f"holdfast: this task on {entry.host} is node {id_}", flush=True)
    given = {**entry.order.environment, "HOLDFAST_PLACEMENT": id_}
    end_with(start(entry.order.command, given, run_dir / "logs" / f"{id_}.txt"))


if __name__ == "__main__":
    main(sys.argv[1:])
