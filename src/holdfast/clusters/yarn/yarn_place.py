"""Carries out one order for a node in a container of YARN, which does not know of orders.

    python -m holdfast.clusters.yarn.yarn_place RUN_DIR [MEMORY_MB]

YARN starts one of these for each node of the job, and another one when one ends. Each claims an
order that does not avoid its host, and ends with the ordered agent; until there is such an order it
keeps its host, so that YARN gives the next container another one.

YARN adds up the memory of a container's processes, and kills it without a word to the job. So all
of them stay below this one, where YARN counts them, and it writes in the order book when they
have more than MEMORY_MB.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from holdfast.clusters.local.local_place import descendants
from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.ray.ray_place import start
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.host.lifetime import adopt_orphans
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.standard_streams import RareLines, print_plain

LOOK_S = 0.5
RESIDENT = 1  # its place among the words of /proc/PID/statm, in pages


def main(argv: list[str]) -> NoReturn:
    """Claim an order and carry it out. Exit status 1: this container has done so before."""
    run_dir, memory_mb = Path(argv[0]), int(argv[1]) if len(argv) > 1 else sys.maxsize
    book = OrderBook(run_dir / ORDERS)
    container, host = os.environ["CONTAINER_ID"], os.environ["NM_HOST"]
    if any(entry.holder == container for entry in book.entries()):
        # YARN has started this container again, and only another container may be another node.
        sys.exit(1)
    problems = RareLines(lambda line: print_plain(line, flush=True))
    while (order := book.take(container, host)) is None:
        if problem := find_problem(run_dir):
            problems.put(f"holdfast: {host} does not see the run directory {problem}")
        else:
            problems.forget()
        time.sleep(LOOK_S)
    print_plain(f"holdfast: {container} on {host} is node {order.id}", flush=True)
    given = {**order.environment, "HOLDFAST_PLACEMENT": order.id}
    adopt_orphans()
    keeper = start(order.command, given, run_dir / "logs" / f"{order.id}.txt")
    MemoryRecord(book, order.id, memory_mb).watch(keeper)


class MemoryRecord:
    """Records in the order book whether this container has more memory than it should have."""

    def __init__(self, book: OrderBook, id_: PlacementId, memory_mb: int) -> None:
        self._book = book
        self._id = id_
        self._memory_mb = memory_mb
        self._is_recorded = False

    def watch(self, keeper: int) -> NoReturn:
        """Look until the keeper has ended, and once more as YARN ends this container."""

        def end(number: int, frame: object) -> NoReturn:
            self._look()  # YARN waits for a quarter of a second before SIGKILL
            os._exit(128 + number)

        signal.signal(signal.SIGTERM, end)
        # The agent may have ended by now, or be killed with all else: this container ends, too.
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(keeper)
            while not wait_readable([ended], LOOK_S):
                self._look()
        self._record("")  # it has ended by itself
        os._exit(0)

    def _look(self) -> None:
        used_mb = sum(map(resident_bytes, [os.getpid(), *descendants()])) >> 20
        is_excess = used_mb > self._memory_mb
        self._record(f"{used_mb} MB, more than the {self._memory_mb} MB" if is_excess else "")

    def _record(self, excess: str) -> None:
        """Record the first excess, or that it is over."""
        if bool(excess) == self._is_recorded:
            return
        with contextlib.suppress(OSError, HoldfastError):  # the run directory may be away
            self._book.note(self._id, excess)
            self._is_recorded = bool(excess)


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory, as YARN counts it; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()[RESIDENT]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def find_problem(run_dir: Path) -> str:
    """Return the reason why the run directory cannot be read from here, or ""."""
    try:
        os.listdir(run_dir)
    except OSError as error:
        return f"{run_dir} ({error.strerror}): all nodes must share it, at the same path"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
