"""Carries out one order for a node in a container of YARN, which does not know of orders.

    python -m holdfast.launch.yarn_place RUN_DIR

YARN starts one of these for each node of the job, and others in place of those that end. Each
claims an order that does not avoid its host, and ends with the ordered agent; until there is such
an order it keeps its host, so that YARN gives the next container another one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from holdfast.launch.order_book import ORDERS, OrderBook
from holdfast.launch.ray_place import end_with, start
from holdfast.net.standard_streams import print_plain

LOOK_S = 0.5


def main(argv: list[str]) -> NoReturn:
    """Claim an order and carry it out. Exit status 1: this container has done so before."""
    run_dir = Path(argv[0])
    book = OrderBook(run_dir / ORDERS)
    container, host = os.environ["CONTAINER_ID"], os.environ["NM_HOST"]
    if any(entry.holder == container for entry in book.entries()):
        # YARN has started this container again, and only another container may be another node.
        sys.exit(1)
    told = ""
    while (order := book.take(container, host)) is None:
        problem = find_problem(run_dir)
        if problem and problem != told:
            print_plain(f"holdfast: {host} does not see the run directory {problem}", flush=True)
        told = problem
        time.sleep(LOOK_S)
    print_plain(f"holdfast: {container} on {host} is node {order.id}", flush=True)
    given = {**order.environment, "HOLDFAST_PLACEMENT": order.id}
    # The agent may have ended by now, or be killed with all else: this container ends in any case.
    end_with(start(order.command, given, run_dir / "logs" / f"{order.id}.txt"))


def find_problem(run_dir: Path) -> str:
    """Return why the run directory cannot be read from here, or ""."""
    try:
        os.listdir(run_dir)
    except OSError as error:
        return f"{run_dir} ({error.strerror}): all nodes must share it, at the same path"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
