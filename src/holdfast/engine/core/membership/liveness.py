"""Finds out by the kernel's counters whether a process is frozen, busy or idle. Pure.

**Frozen or busy.** A worker that has joined its job has a control thread that either wakes several
times a second or, while other code keeps the interpreter lock, retries for it every few
milliseconds. Either way the kernel counts context switches and CPU time for the process. A stopped,
suspended or starved process gains none at all. So a process is frozen if no counter grows over
several samples, or if the kernel reports it stopped. Anything else is work, however long it takes.
Before it has joined, a script may wait for a disk or a server without being scheduled: then only
the kernel's report counts.

Samples are counted, not only timed, so that a pause of the observer itself is never mistaken for a
pause of the observed process.

**Busy or idle.** A script for torchrun has no such thread. Without a heartbeat it is at work if it
and its children use a fair amount of processor time, or print. So a process that waits while it
keeps a processor busy, as NCCL does, passes for one at work; a script that writes its step to a
file is judged by that file alone."""

from __future__ import annotations

from dataclasses import dataclass

SHARE_MIN = 0.02  # share of one processor; threads that only watch something need less


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """Describes a process: its kernel state letter, and a counter that grows as it runs."""

    #: The letter in /proc/PID/stat: R, S, D, T (stopped), t (traced), Z.
    state: str
    #: CPU ticks plus context switches, summed over all threads.
    progress: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySample:
    """Describes a process and its children at one moment."""

    #: The time, in seconds.
    at: float
    #: The CPU time so far.
    cpu_s: float
    #: The bytes printed so far.
    printed: int
    #: The step in its heartbeat file.
    step: int | None = None


class ActivityMeter:
    """Watches one process. `observe` returns whether it was at work since the last look."""

    def __init__(self, first: ActivitySample) -> None:
        self._last = first

    def observe(self, sample: ActivitySample) -> bool:
        last, self._last = self._last, sample
        if sample.step is not None:
            return sample.step != last.step
        # The CPU time of a child disappears from the sum when the child ends.
        busy = abs(sample.cpu_s - last.cpu_s) > SHARE_MIN * (sample.at - last.at)
        return busy or sample.printed != last.printed
