"""Serves the store by which a group's processes find each other, on the node of its rank 0.

    python -m holdfast.engine.runtime.node.group_store

Every group gets a store of its own, so that no key of an earlier one is ever read.
"""

from __future__ import annotations

import os
import sys

from holdfast.engine.core.views import View
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.runtime.node.group_channel import GroupChannel

MODULE = "holdfast.engine.runtime.node.group_store"


def main(argv: list[str]) -> int:
    """Serve one group after the other, until the agent ends this process."""
    failure_fd = bootstrap.attach()
    return bootstrap.run_told(_serve, bootstrap.teller(failure_fd))


def _serve() -> None:
    from holdfast.engine.train.rendezvous_store import open_store  # takes seconds

    host = os.environ["HOLDFAST_HOST"]
    channel = GroupChannel.take_channel()
    channel.report_ready()
    kept: list[object] = []  # a store lives as long as its object
    view: View | None = None

    def address(view: View) -> bytes:
        store = open_store(host)
        kept[:] = [store]
        return f"{host}:{store.port}".encode()

    while True:
        view, _ = channel.wait_group(view, address)


if __name__ == "__main__":
    bootstrap.leave(main(sys.argv[1:]))
