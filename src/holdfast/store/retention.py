"""Decides which checkpoints to keep. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keeps a checkpoint if any of these rules wants it; the newest is always kept."""

    last: int = 3  # how many of the newest are kept
    settled: int = 0  # and the newest one that is older than the newest by these steps
    every: int = 0  # and those whose step is a multiple of this; 0: none
    age_s: float = 0.0  # and those younger than this; 0: none


def choose_kept(
    saved: Sequence[tuple[int, float]], policy: Retention, now: float
) -> tuple[int, ...]:
    """Choose the steps to keep, in order. `saved`: step and time (seconds since 1970) of each.

    The newest is the one saved last: a job that had to go back saves lower steps again.
    """
    ordered = sorted(saved)
    latest = sorted(saved, key=lambda one: (one[1], one[0]))
    newest = {step for step, _ in latest[-max(policy.last, 1) :]}
    settled = [s for s, _ in ordered if latest and s <= latest[-1][0] - policy.settled]
    if policy.settled and settled:
        newest.add(settled[-1])
    return tuple(
        step
        for step, time in ordered
        if step in newest
        or (policy.every > 0 and step % policy.every == 0)
        or now - time < policy.age_s
    )
