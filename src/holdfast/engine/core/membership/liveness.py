"""Distinguishes frozen processes from busy ones by the kernel's counters, never by one timeout.

A worker that has joined its job has a control thread that either wakes several times a second or,
while other code holds the interpreter lock, retries for it every few milliseconds. Either way the
kernel counts context switches and CPU time for the process. A stopped, suspended or starved process
gains none at all. So: no progress of any counter over several samples, or the kernel's own word
that the process is stopped, is a freeze; anything else is work, however long it takes. Before it
has joined, a script may wait for a disk or a server without being scheduled: only the kernel's word
counts then.

Samples are counted, not only timed, so that a pause of the observer itself is never mistaken for a
pause of the observed process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """Describes a process: its kernel state letter, and a counter that grows as it runs."""

    state: str  # as in /proc/PID/stat: R, S, D, T (stopped), t (traced), Z
    progress: int  # CPU ticks plus context switches, summed over all threads


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePolicy:
    """Sets the samples in a row that make a freeze: by default 1 s stopped, or 2.5 s silent."""

    sample_s: float = 0.25
    stopped_samples: int = 4
    silent_samples: int = 10


class FreezeDetector:
    """Watches one process. `observe` returns the reason once the process counts as frozen.

    `joined`: it has a control thread that is scheduled all the time.
    """

    def __init__(self, policy: FreezePolicy, *, joined: bool = True) -> None:
        self.joined = joined
        self._policy = policy
        self._progress = -1
        self._stopped = 0
        self._silent = 0

    def observe(self, sample: ProcessSample) -> str | None:
        policy = self._policy
        self._stopped = self._stopped + 1 if sample.state == "T" else 0
        moved = sample.progress != self._progress or sample.state == "t"
        self._silent = 0 if moved or not self.joined else self._silent + 1
        self._progress = sample.progress
        if self._stopped >= policy.stopped_samples:
            seconds = self._stopped * policy.sample_s
            return f"frozen: the kernel reports it stopped for {seconds:.2g} s"
        if self._silent >= policy.silent_samples:
            seconds = self._silent * policy.sample_s
            return f"frozen: no thread of it was scheduled for {seconds:.2g} s"
        return None
