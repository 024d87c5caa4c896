"""Runs the control thread: this worker's connection to its agent, over an inherited socket.

It answers a few times a second whatever the script is doing, which also proves to the agent that
the process is alive. When the connection ends, the agent is gone and with it the right to act.
At the agent's request it writes the stacks of all threads, for people who wonder why one hangs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground.events import Directed
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.types import RELEASE_ALL, AgentId, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.net.descriptors import is_readable, wait_readable
from holdfast.engine.state.store.regular_files import append_regular
from holdfast.engine.train.step.driver import Driver
from holdfast.engine.wire.frames import Opener, Sealer
from holdfast.engine.wire.messages import Address, AddressBook, StacksRequest, decode, encode

VARIABLE = "HOLDFAST_STACKS"  # names the file; without it no stacks are written
PATIENCE_S = 0.2  # for the disk, before further stacks are left out
BYTES_MAX = 1 << 20  # a file that is longer begins from the start

_writing: list[threading.Thread] = []  # none or one


def write_stacks(reason: str, shard: int = 0) -> None:
    """Append the stacks of all threads but this one to the file, below a line with the reason.

    All processes of a worker on one node write to the same file; `shard`: the shard of this one.
    A thread of Python does it, which has the interpreter's lock: faulthandler reads the frames of
    threads while they run, and sending a thousand signals to a busy process ended it by SIGSEGV.
    """
    path = os.environ.get(VARIABLE, "")
    if not path:
        return
    text = "".join(describe_stacks(f"{reason} (process {shard})" if shard else reason))
    # The caller receives the agent's messages: a disk that hangs must not keep it from that.
    if wait_for_stacks(PATIENCE_S):
        writing = threading.Thread(target=_append, args=(path, text), daemon=True, name="stacks")
        _writing[:] = [writing]
        writing.start()


def wait_for_stacks(limit_s: float) -> bool:
    """Wait until the last stacks are written; return whether they are."""
    for each in _writing:
        each.join(limit_s)
    return not any(each.is_alive() for each in _writing)


def _append(path: str, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop training
        file = os.fdopen(append_regular(path), "ab", buffering=0)
        with file:
            if os.fstat(file.fileno()).st_size > BYTES_MAX:
                os.ftruncate(file.fileno(), 0)
            file.write(text.encode(errors="replace"))


def describe_stacks(reason: str) -> list[str]:
    """Return lines on each thread, innermost call first. No source file is read for them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n"]
    for number, frame in _find_frames().items():
        if number == threading.get_ident():
            continue
        found.append(f"\nThread {names.get(number, number)}:\n")
        for each, line in traceback.walk_stack(frame):
            code = each.f_code
            found.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
    return [*found, "\n"]


def _find_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, without a garbage collection in between.

    Before Python 3.11.9 one could stop this process for ever: both may take the same lock of the
    interpreter (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


HEARTBEAT_S = 0.5
POLL_S = 0.1
ACCEPTED = (WorkerDirective, AddressBook, StacksRequest)


class AgentLink:
    """Sends statuses at once and heartbeats in between; feeds directives to the driver."""

    def __init__(self, channel: socket.socket, worker: WorkerId) -> None:
        self._channel = channel
        self._worker = worker
        self._sealer = Sealer(None)
        self._lock = threading.Lock()
        #: To further processes.
        self.pass_on: Callable[[StacksRequest], None] = lambda _: None
        #: The addresses of the servers of tables, by number.
        self.servers: dict[int, str] = {}
        #: The addresses of their heirs, likewise.
        self.heirs: dict[int, str] = {}
        #: The newest layout of the rows on servers.
        self.layout: ServerLayout | None = None
        self.note_layout: Callable[[ServerLayout], None] = lambda _: None
        self._addresses: dict[Peer, Address] = {}  # sent again until the address book comes

    def tell(self, status: WorkerStatus) -> None:
        self._send(status)

    def publish(self, view: int, address: bytes, shard: int = 0) -> None:
        peer = Peer(self._worker, shard)
        told = Address(view=view, peer=peer, address=address)
        with self._lock:
            current = {p: a for p, a in self._addresses.items() if a.view == view}
            self._addresses = {**current, peer: told}
        self._send(told)

    def has_unread(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return is_readable(self._channel)
        return False

    def start(self, driver: Driver) -> None:
        args = (driver,)
        threading.Thread(target=self._serve, args=args, name="holdfast-link", daemon=True).start()

    def _send(self, message: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader notices a lost agent
            self._channel.sendall(self._sealer.seal(encode(message)))

    def _serve(self, driver: Driver) -> None:
        opener = Opener(None)
        beat_at = time.monotonic()
        while True:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + HEARTBEAT_S
                self._send(driver.status())
                for told in self._addresses.values():
                    self._send(told)
            driver.times.note_alive()
            driver.tick()
            if not wait_readable([self._channel], POLL_S):
                continue
            try:
                data = self._channel.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                end_lost("its agent is gone, so that nothing could fence it any more")
            try:
                for payload in opener.feed(data):
                    self._receive(driver, payload)
            except WireError as error:
                driver.fail(error)

    def _receive(self, driver: Driver, payload: bytes) -> None:
        message: WorkerDirective | AddressBook | StacksRequest = decode(payload, *ACCEPTED)
        if isinstance(message, StacksRequest):
            self.pass_on(message)
            write_stacks(message.reason)
        elif isinstance(message, AddressBook):
            if any(told.view == message.view for told in self._addresses.values()):
                with self._lock:
                    self._addresses = {}
                driver.learn_addresses(message.view, dict(message.addresses))
        else:
            self.servers, self.heirs = (
                {each.number: each.address for each in message.servers if each.heir is is_heir}
                for is_heir in (False, True)
            )
            if message.layout is not None:
                self.layout = message.layout
                self.note_layout(message.layout)
            driver.post(Directed(message))


class SoloLink:
    """Stands in for an agent in a job of one worker, whose only view is installed at once."""

    def __init__(self, worker: WorkerId, vranks: int) -> None:
        self._worker = worker
        self._vranks = vranks

    def tell(self, status: WorkerStatus) -> None:
        return

    def publish(self, view: int, address: bytes) -> None:
        return

    def has_unread(self) -> bool:
        return False

    def start(self, driver: Driver) -> None:
        status = driver.status()
        member = Member(worker=self._worker, incarnation=status.incarnation, agent=AgentId("solo"))
        view = View(
            number=ViewNumber(1),
            members=(member,),
            owners=(self._worker,) * self._vranks,
            resume_step=0,
            leader=self._worker,
            joiners=(self._worker,),
            reason="a job of one worker without a launcher",
        )
        driver.post(Directed(WorkerDirective(view=view, release_loop=RELEASE_ALL)))
