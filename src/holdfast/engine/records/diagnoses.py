"""Names the cause of an incident, the party at fault, and what people can do about it.

Each row of the table recognizes one kind of cause by the kind of an event and a phrase of its text.
The rows stand in the order of causes before consequences: the first row that fits any event of an
incident is its diagnosis. A test ensures that every phrase is still in the texts that are logged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.engine.core.machine_errors import MachineError

Event = Mapping[str, Any]


class Party(enum.Enum):
    """Names the party at fault, in the words that people read."""

    MACHINE = "the machine"
    NETWORK = "the network"
    STORAGE = "the storage"
    SCRIPT = "the script"
    ON_PURPOSE = "no one: an operator or the scheduler has asked for it"
    KILLER = "whoever sent the signal: an operator, another program, or the machine's kernel"
    MACHINE_OR_NETWORK = "the machine, or the network to it"
    MACHINE_OR_SCRIPT = "the machine, or the script"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Describes one row: events of `kind` whose text has `phrase` have this cause."""

    kind: str
    phrase: str
    fault: Party
    advice: str


def _row(kind: str, phrase: str, fault: Party, advice: str) -> Cause:
    return Cause(kind=kind, phrase=phrase, fault=fault, advice=advice)


_DOCTOR = "run `holdfast doctor` there; if it happens again, take the machine out of the job"
_NODE = "see whether that node still lives"
_NONE = "no action is needed"
_SCRIPT_LOG = "read the end of the worker's log, and mend the script"
_NETWORK = "look for lost packets and at the machines' kernel logs; try `holdfast doctor` on both"
_NATIVE = (
    "read the stack in the worker's log: a library may be at fault; if it is another place each "
    "time, test the machine's memory"
)
_SLOW = (
    "look for other programs and hot processors there (`holdfast doctor`); more virtual ranks than "
    "workers let the job give it less to do"
)

CAUSES = (
    _row(
        "resume",
        "",
        Party.KILLER,
        "find out what ended the launcher: its machine's log, or the scheduler's, says so",
    ),
    _row("wrong", "joined before step", Party.MACHINE_OR_SCRIPT, _DOCTOR),
    _row("wrong", "none has a majority", Party.MACHINE_OR_SCRIPT, _DOCTOR),
    _row("wrong", "is not that of the others", Party.MACHINE, _DOCTOR),
    _row("wrong", "has computed virtual rank", Party.MACHINE, _DOCTOR),
    _row("wrong", "was computed wrongly here once", Party.MACHINE, _DOCTOR),
    _row("wrong", "has summed a part", Party.MACHINE_OR_NETWORK, _DOCTOR),
    _row("wrong", "that were not finite", Party.MACHINE, _DOCTOR),
    _row("wrong", "came to other bits", Party.MACHINE_OR_SCRIPT, _DOCTOR),
    *(_row("lost", each.what, Party.MACHINE, each.remedy or _SCRIPT_LOG) for each in MachineError),
    _row("failed", "on every worker)", Party.MACHINE, "mend that on the machines, then resume"),
    _row(
        "lost",
        "frozen: the kernel reports it stopped",
        Party.KILLER,
        "look for a debugger, a suspended machine, or SIGSTOP",
    ),
    _row("lost", "frozen: no thread", Party.MACHINE, "look for a machine without free processors"),
    _row("lost", "hung for", Party.SCRIPT, "read where its threads stood: stacks/ in the run"),
    _row("lost", "the agent of node", Party.KILLER, "read the kernel's log of that node"),
    _row(
        "lost",
        "ended by SIGKILL",
        Party.KILLER,
        "read the kernel's log of that node: without memory, the kernel kills processes",
    ),
    *(
        _row("lost", f"ended by {name}", Party.MACHINE_OR_SCRIPT, _NATIVE)
        for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
    ),
    _row("lost", "ended by", Party.KILLER, "ask who sent that signal"),
    _row("lost", "os._exit", Party.SCRIPT, "find the code that calls os._exit"),
    _row("lost", "it left the job, because it computed wrongly", Party.MACHINE, _DOCTOR),
    _row("lost", "earlier line of the script", Party.ON_PURPOSE, _NONE),
    _row("lost", "no coordinator was heard", Party.MACHINE_OR_NETWORK, _NETWORK),
    _row("lost", "on another node, was lost", Party.MACHINE_OR_NETWORK, _NODE),
    _row("lost", "silent for", Party.MACHINE_OR_NETWORK, _NODE),
    _row("lost", "is lost", Party.MACHINE_OR_NETWORK, _NODE),
    _row("quarantined", "it computes wrongly", Party.MACHINE, _DOCTOR),
    _row("quarantined", "the network does not reach it", Party.NETWORK, _NETWORK),
    _row("replaced", "hung for", Party.SCRIPT, "read where its threads stood: stacks/ in the run"),
    _row("lost", "", Party.UNKNOWN, "read the end of the worker's log"),
    _row("restart", "was lost", Party.MACHINE, _NODE),
    _row("restart", "failed", Party.SCRIPT, _SCRIPT_LOG),
    _row("leave", "", Party.ON_PURPOSE, _NONE),
    _row("drain", "", Party.ON_PURPOSE, _NONE),
    _row("silent", "", Party.MACHINE_OR_NETWORK, "look at that node's load and network"),
    _row("late", "", Party.MACHINE, _SLOW),
    _row(
        "rot", "", Party.STORAGE, "check that storage, and what wrote to it: `holdfast ckpt verify`"
    ),
    _row("record", "", Party.STORAGE, "restore the data: `holdfast data verify` says what differs"),
    _row("straggler", "network of worker", Party.NETWORK, _NETWORK),
    _row("straggler", "link from worker", Party.NETWORK, _NETWORK),
    _row("straggler", "", Party.MACHINE, _SLOW),
    _row(
        "failed",
        "of the dataset",
        Party.STORAGE,
        "restore the data: `holdfast data verify` says what differs",
    ),
    _row(
        "failed",
        "",
        Party.SCRIPT,
        "mend what the sentence names, then use `holdfast resume`",
    ),
    _row("replaced", "has missed too many steps", Party.MACHINE, _SLOW),
    _row("stop_view", "lost its connection to", Party.NETWORK, _NETWORK),
    _row("stop_view", "does not reach", Party.NETWORK, _NETWORK),
    _row("stop_view", "all workers wait for each other", Party.MACHINE_OR_NETWORK, _NETWORK),
    _row("stop_view", "cannot exchange", Party.NETWORK, _NETWORK),
    _row("stop_view", "cannot get the state", Party.STORAGE, "see whether the store answers"),
    _row("stop_view", "hears no coordinator", Party.MACHINE_OR_NETWORK, _NETWORK),
    _row("stop_view", "late", Party.MACHINE, _SLOW),
)
_REST = Cause(kind="", phrase="", fault=Party.UNKNOWN, advice="read the story above")


def find_headline(text: str) -> str:
    """Return the first line of a text; where a Python stack follows, with the error below it."""
    first, _, rest = text.partition("\n")
    who, stack, _ = first.partition(": Traceback (most recent call last):")
    return f"{who}: {rest.splitlines()[-1]}" if stack and rest else first


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Gives the event that began an incident, the party at fault, and advice."""

    event: Event
    fault: Party
    advice: str

    @property
    def place(self) -> str:
        """Return the cause's node to end a sentence; empty if unknown, or if the text names it."""
        node, text = self.event.get("node"), str(self.event["text"])
        is_new = isinstance(node, str) and node and f"node {node}" not in text
        return f" (node {node})" if is_new else ""

    def lines(self) -> list[str]:
        """Return the lines that end a story."""
        text = find_headline(str(self.event["text"]))
        return [
            f"Cause: {text}{self.place}.",
            f"At fault: {self.fault.value}.",
            f"What to do: {self.advice}.",
        ]


def diagnose(events: Sequence[Event]) -> Diagnosis:
    """Return the diagnosis of an incident that consists of these events, the oldest first."""
    found = ((cause, event) for cause in CAUSES for event in _fitting(cause, events))
    cause, event = next(found, (_REST, events[0]))
    return Diagnosis(event=event, fault=cause.fault, advice=cause.advice)


def _fitting(cause: Cause, events: Iterable[Event]) -> Iterable[Event]:
    return (e for e in events if e["kind"] == cause.kind and cause.phrase in str(e["text"]))
