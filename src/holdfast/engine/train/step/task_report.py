"""Defines a task's report: its results besides its gradient and its row.

All members receive all reports of a step when it is committed, in the order of virtual ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.train.step.packed_trees import unpack


class TaskReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Contains packed trees: `values` for the script to gather, and the rank's new `states`.

    `bad`: names the records that the task had to leave out, as data/quarantine encodes them.
    """

    bad: bytes = b""
    values: dict[str, bytes] = {}
    states: dict[str, bytes] = {}

    def encode(self) -> bytes:
        """Return the encoded report; b"" if it is empty."""
        return msgspec.msgpack.encode(self) if self.bad or self.values or self.states else b""

    @property
    def digest(self) -> int:
        """Return 63 bits of all values and states; 0 without any."""
        if not (self.values or self.states):
            return 0
        return xxhash.xxh3_64_intdigest(_encode((self.values, self.states))) >> 1


NOTHING = TaskReport()
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode = msgspec.msgpack.Decoder(TaskReport).decode


def read_report(data: bytes) -> TaskReport:
    """Return the report that was encoded. WireError if it is damaged."""
    try:
        return _decode(data) if data else NOTHING
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"a task's report cannot be read: {error}") from None


class GatheredValues(Mapping[str, list]):
    """Maps names to the gathered values of a committed step, in the order of virtual ranks.
    UserError for a name that no task of the step has used.
    """

    def __init__(self, step: int, reports: Mapping[int, TaskReport]) -> None:
        self._step = step
        self._packed: dict[str, list[bytes]] = {}
        for _, report in sorted(reports.items()):
            for name, value in report.values.items():
                self._packed.setdefault(name, []).append(value)
        self._unpacked = functools.cache(lambda name: [unpack(v) for v in self._packed[name]])

    def __getitem__(self, name: str) -> list:
        if name not in self._packed:
            known = f"but {', '.join(map(repr, self._packed))}" if self._packed else "nor any other"
            raise UserError(
                f"step.gathered[{name!r}]: no task of step {self._step} has called "
                f"step.gather({name!r}, ...), {known}"
            )
        return self._unpacked(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the list of a name's values; `default` if no task of the step has used it."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
