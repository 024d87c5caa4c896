"""Checks that virtual ranks which are summed early are hosted near each other.

The bytes that leave a machine, a rack or a zone are few only if each of them hosts one block of
virtual ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from holdfast.engine.core.domains import Path
from holdfast.engine.core.views import View
from holdfast.lab.sim.wrong_bits import Violation


def check_neighbours(view: View) -> None:
    """Check a new view: machines and failure domains host one block of virtual ranks each.

    Views that begin in the middle of a step are exempt, since results would be lost. So are views
    with fed members: blocks are cut again once these have voted.
    """
    if not view.joiners or view.fed:
        return
    paths = [view.paths[owner] for owner in view.owners]
    for depth in range(1, max(map(len, paths)) + 1):
        if twice := find_scattered(paths, depth):
            raise Violation(f"view {view.number}: {twice} hosts several blocks of virtual ranks")


def find_scattered(paths: Sequence[Path], depth: int) -> Path | None:
    """Find a machine or domain that hosts several blocks.

    `paths`: where the host of each virtual rank is. `depth`: how many names of a path count.
    """
    blocks = [near for near, _ in groupby(path[:depth] for path in paths)]
    known: set[Path] = set()
    for near in blocks:
        if near in known:
            return near
        known.add(near)
    return None
