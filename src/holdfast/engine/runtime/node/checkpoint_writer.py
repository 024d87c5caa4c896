"""Runs a node's checkpoint writer, which saves its workers' copies while they train on.

    python -m holdfast.engine.runtime.node.checkpoint_writer RUN_DIR FD PARENT_PID

It takes orders from a socket that it inherits (see store/snapshot.py). Each is carried out in a
thread of its own: share 0 of a checkpoint waits for all shares, which may come from other nodes,
and commits. It runs at a low priority. Its launcher orders it to end once it has finished these.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.engine.core.errors import Damaged, HoldfastError, UserError, WorldError
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.host.lifetime import Orders, die_with_parent
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.outlet import free_output
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.checkpoints import Checkpoints, Pacer, scrub
from holdfast.engine.state.store.manifest import PROCS, VIEW
from holdfast.engine.state.store.open import check_writable, open_storage
from holdfast.engine.state.store.saving import Saving
from holdfast.engine.state.store.snapshot import Delivery, SaveAnswer, receive
from holdfast.engine.state.store.storage import Storage

NICENESS = 10
SCRUB_S = 3600.0  # between two passes over all checkpoints
OTHERS_S = 10.0  # to wait for the other shares, at least; and at least
OTHERS_TIMES = 4.0  # what this share has taken


class Writer:
    """Carries out orders, as the module describes."""

    def __init__(self, store: Checkpoints, keep: Retention) -> None:
        self._store = store
        self._keep = keep
        self._commits = 0
        self._published: list[Saving] = []  # shares that another writer commits
        self._lock = threading.Lock()
        self._under_way: list[threading.Thread] = []

    def serve(self, channel: socket.socket, orders: Orders | None = None) -> bool:
        """Serve until no worker and no agent is left, or the launcher orders the end.

        Return whether it does.
        """
        sources = [channel.fileno()] if orders is None else [channel.fileno(), orders.descriptor]
        while True:
            ready = wait_readable(sources)
            if orders is not None and orders.read():
                return True
            if channel.fileno() not in ready:
                continue
            try:
                delivery = receive(channel)
            except Damaged as error:
                print_line(str(error))
                continue
            if delivery is None:
                return False
            thread = threading.Thread(target=self._carry_out, args=(delivery,), daemon=True)
            thread.start()
            self._under_way = [t for t in self._under_way if t.is_alive()] + [thread]

    def finish(self) -> None:
        """Wait until everything that was ordered is carried out."""
        for thread in self._under_way:
            thread.join()

    def scrub(self, rate: float, pause: Callable[[float], object] = time.sleep) -> None:
        """Verify checkpoints, slowly and for ever, if this is the writer that commits."""
        seen = 0
        while True:
            pause(SCRUB_S)
            if self._commits > seen:
                seen = self._commits
                try:
                    for line in scrub(self._store, Pacer(rate, pause)):
                        print_line(line)
                except HoldfastError as error:
                    print_line(f"the kept checkpoints cannot be verified: {error}")

    def _carry_out(self, delivery: Delivery) -> None:
        answer = SaveAnswer(problem="the checkpoint writer has failed, and says why on its console")
        try:
            answer = SaveAnswer(durable=self._save(delivery))
        except HoldfastError as error:
            answer = SaveAnswer(problem=str(error))
        finally:
            delivery.answer(answer)

    def _save(self, delivery: Delivery) -> bool:
        """Save a share; return whether the whole checkpoint is durable now, not just this share."""
        order, began = delivery.order, time.monotonic()
        for before in self._take_older(order.step):
            before.abandon()
        view = ViewNumber(order.view)
        saving = self._store.begin(order.step, order.token, order.rank, view)
        try:
            part = saving.write(
                delivery.items(), order.rank, state_print=order.state_print, shard=order.shard
            )
            if order.rank > 0:
                saving.publish(part)
                with self._lock:
                    self._published.append(saving)
                return False
            taken_s = time.monotonic() - began
            wait_s = max(OTHERS_S, OTHERS_TIMES * taken_s)
            parts = [part, *saving.gather(order.size, wait_s, order.patience_s)]
            about = {"steps": str(order.step), VIEW: str(order.view)}
            saving.commit(parts, about | ({PROCS: str(order.procs)} if order.procs > 1 else {}))
        except BaseException:
            saving.abandon()
            raise
        self._commits += 1
        try:
            self._store.collect(self._keep)
        except WorldError as error:  # the checkpoint is there all the same
            print_line(f"old checkpoints are not removed: {error}")
        return True

    def _take_older(self, step: int) -> list[Saving]:
        """Shares of earlier checkpoints: committed by now, or never."""
        with self._lock:
            older = [saving for saving in self._published if saving.step < step]
            self._published = [saving for saving in self._published if saving.step >= step]
        return older


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.engine.runtime.node.checkpoint_writer"
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("fd", type=int)
    parser.add_argument("parent_pid", type=int)
    options = parser.parse_args(argv)
    die_with_parent(options.parent_pid)
    orders = Orders.receive()
    free_output("")
    os.nice(NICENESS)
    spec = RunDir(options.run_dir).spec()
    saved, settled = spec.checkpoints, spec.silent_errors.fingerprint_steps
    storage = open_storage(saved.store, print_line)
    store = Checkpoints(storage, print_line)
    writer = Writer(store, Retention(last=saved.keep_last, settled=settled))
    if saved.scrub_rate > 0:
        rate = saved.scrub_rate * 1e6
        threading.Thread(target=writer.scrub, args=(rate,), daemon=True).start()
    # In a thread of its own: a store that does not answer holds up no order.
    threading.Thread(target=_probe, args=(storage, saved.store), daemon=True).start()
    with socket.socket(fileno=options.fd) as channel:
        is_told = writer.serve(channel, orders)
        writer.finish()
    return 128 + signal.SIGTERM if is_told else 0


def _probe(storage: Storage, text: str) -> None:
    """Print whether this node cannot write to the store, long before the first checkpoint."""
    try:
        check_writable(storage, text)
    except UserError as error:
        print_line(f"this node can save no checkpoints: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
