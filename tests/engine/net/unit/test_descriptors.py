"""Descriptors: the limit is raised at start, and running low is printed once."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from holdfast.engine.net.descriptors import DescriptorWatch, raise_limit

SPARE = 200


@pytest.fixture
def low_limit() -> Iterator[int]:
    """Lower this process's soft limit for the test; returns the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (10 * len(os.listdir("/proc/self/fd")) + SPARE, hard)
    )
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised(low_limit: int) -> None:
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(low_limit, 1 << 16)


def test_running_low_is_said_once(low_limit: int) -> None:
    watch, held = DescriptorWatch(), []
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        assert watch.complaint() == ""
        while not held or held[-1] < soft * 0.9:
            held.append(os.open("/", os.O_RDONLY))
        assert watch.complaint().startswith(f"of {soft} file descriptors {soft * 9 // 10 // 10}")
        assert watch.complaint() == ""
    finally:
        for each in held:
            os.close(each)
