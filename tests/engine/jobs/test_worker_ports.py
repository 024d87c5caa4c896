"""Strangers at the ports of workers: they stop no worker, and leave no trace."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack, suppress

import pytest

from conftest import RUN_S, Start, finish
from holdfast.engine.runtime.local_run import strike

STRANGERS = 200
SILENT = 300
STEPS = ("--steps", "50", "--task-s", "0.02")


def sockets_of(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports at which a process listens."""
    inodes, found = sockets_of(pid), []
    with open(f"/proc/{pid}/net/tcp") as table:
        for fields in [line.split() for line in list(table)[1:]]:
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def connect(stack: ExitStack, port: int, said: bytes) -> None:
    stranger = stack.enter_context(socket.socket())
    stranger.settimeout(RUN_S)
    with suppress(OSError):
        stranger.connect(("127.0.0.1", port))
        stranger.sendall(said)


@pytest.mark.slow
def test_guessed_bytes_do_not_keep_a_group_from_forming(start: Start) -> None:
    with start(*STEPS, nproc=2) as run, ExitStack() as stack:
        members = run.until_members(2)
        # The survivor, to which the returning worker connects, and the other way round.
        for pid in members.values():
            for port in run.until(lambda pid=pid: ports_of(pid), RUN_S, "a port"):
                for number in range(STRANGERS):
                    connect(stack, port, struct.pack("<q", number))
        strike(members[0])
        finish(run)
    views = run.events("view")
    assert len(views) <= 8, views


@pytest.mark.slow
def test_silent_strangers_leave_no_descriptors_behind(start: Start) -> None:
    with start("--steps", "100000", "--task-s", "0.02", nproc=2) as run, ExitStack() as stack:
        members = run.until_members(2)
        ports = run.until(lambda: ports_of(members[0]), RUN_S, "a port")
        before = len(sockets_of(members[0]))
        for port in ports:
            for _ in range(SILENT):
                connect(stack, port, b"")
        run.until(
            lambda: len(sockets_of(members[0])) <= before + 8, RUN_S, "the strangers are gone"
        )
