"""Descriptors: the limit is raised at start, and running low is printed once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.engine.net.descriptors import raise_limit

SOFT = 200
SCRIPT = """
import json, os, resource, sys
from holdfast.engine.net.descriptors import DescriptorWatch
soft = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
watch, held = DescriptorWatch(), []
texts = [watch.complaint()]
while not held or held[-1] < soft * 0.9:
    held.append(os.open("/", os.O_RDONLY))
print(json.dumps([*texts, watch.complaint(), watch.complaint()]))
"""


@pytest.fixture
def low_limit() -> Iterator[int]:
    """Lower this process's soft limit for the test; returns the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised(low_limit: int) -> None:
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(low_limit, 1 << 16)


def test_running_low_is_said_once() -> None:
    # In a process of its own: earlier tests may have left descriptors open in this one.
    command = [sys.executable, "-c", SCRIPT, str(SOFT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    before, first, second = json.loads(done.stdout)
    assert before == ""
    assert first.startswith(f"of {SOFT} file descriptors 18")
    assert second == ""
