"""Descriptors are waited for, also where a process has very many of them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from holdfast.engine.net.descriptors import is_readable, wait_readable

BEYOND = 1100  # more than select.select can name


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a pair of sockets with high numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * BEYOND:
        pytest.skip(f"a process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * BEYOND), hard))
    ends = socket.socketpair()
    high = [socket.socket(fileno=os.dup2(e.fileno(), BEYOND + i)) for i, e in enumerate(ends)]
    for end in ends:
        end.close()
    yield high[0], high[1]
    for end in high:
        end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_may_have_any_number(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    assert left.fileno() >= BEYOND
    assert not is_readable(left)
    assert wait_readable([left, right], 0.0) == []
    right.send(b"x")
    assert wait_readable([left, right], 5.0) == [left]
    assert wait_readable([left.fileno()], None) == [left.fileno()]


def test_a_closed_end_can_be_read(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.close()
    assert is_readable(left)
    with pytest.raises(ValueError, match="file descriptor"):
        is_readable(right)


def test_a_number_that_is_closed_is_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        is_readable(read)


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_a_very_long_time_is_allowed(
    timeout_s: float, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    right.send(b"x")
    assert wait_readable([left], timeout_s) == [left]
