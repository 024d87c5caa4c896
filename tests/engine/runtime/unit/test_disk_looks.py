"""Reads from a disk that hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.engine.runtime import event_loops
from holdfast.engine.runtime.event_loops import DiskLook

WAIT_S = 30.0


def test_a_look_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loops, "PATIENCE_S", 0.05)
    goes_on, calls = threading.Event(), list[int]()

    def look() -> int:
        calls.append(1)
        assert goes_on.wait(WAIT_S)
        return 7

    async def scenario() -> None:
        disk = DiskLook(look, 0)
        assert [await disk.ask(), await disk.ask()] == [0, 0]
        assert len(calls) == 1  # a further one would hang as well
        goes_on.set()
        while await disk.ask() != 7:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_an_error_of_a_look_is_its_callers() -> None:
    def look() -> int:
        raise OSError("this disk is broken")

    with pytest.raises(OSError, match="broken"):
        asyncio.run(DiskLook(look, 0).ask())
