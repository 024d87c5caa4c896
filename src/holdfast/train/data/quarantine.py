"""Keeps which records of a dataset nobody reads any more, and which others stand in for them.

Must not know torch or workers. A worker that cannot read a record as it should be uses a substitute
and tells so together with its task's results: whoever has the step has what was told of it. From
the script's next step on all leave the record out, whether they could read it or not. Invariant:
which records a task uses follows from its indices, from what was quarantined before its step, and
from what the task itself has told.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import UserError, WireError

REASON_CHARS_MAX = 200

Bad = dict[int, str]  # why a record was left out
_decode = msgspec.msgpack.Decoder(Bad).decode


def replaced(
    indices: NDArray[np.int64], bad: Collection[int], length: int
) -> tuple[NDArray[np.int64], set[int]]:
    """Put in place of each bad record another one, far from it, that is not bad.

    Neighbours are often bad together, and one record should not stand in for all of them.
    Returns what is used, and the bad records that were met on the way. UserError if all are bad.
    """
    met: set[int] = set()
    if not bad:
        return indices, met
    if len(bad) >= length:
        raise UserError(f"all {length} records of the dataset are bad: check its storage")
    found, stride = indices.copy(), _stride(length)
    for place, record in enumerate(indices.tolist()):
        while record in bad:
            met.add(record)
            record = (record + stride) % length
        found[place] = record
    return found, met


@functools.lru_cache(maxsize=16)
def _stride(length: int) -> int:
    """Return a step that leads from each record to all others: about 0.6 of the length."""
    stride = max(1, length * 618 // 1000)
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride


def encode_bad(bad: Mapping[int, str]) -> bytes:
    """Return what a task tells of records that it had to leave out; nothing if there are none."""
    return msgspec.msgpack.encode({r: bad[r] for r in sorted(bad)}) if bad else b""


class Quarantine:
    """Holds the quarantined records of one dataset; `records` is a part of the job's state.

    `number`: which of the script's datasets it is, from 1 on. `most`: how many records of all
    datasets together may be quarantined before the job stops.
    """

    def __init__(self, number: int, length: int, records: dict[int, int], most: int) -> None:
        self.number = number
        self.length = length
        self.records = records  # and the script's step in which each was found
        self.most = most
        self.turn: dict[int, tuple[int, ...]] = {}  # told in the script's present step, by vrank

    def known(self, vrank: int) -> frozenset[int]:
        """Return what a virtual rank's task leaves out without trying: also in later rounds."""
        return frozenset(self.records) | frozenset(self.turn.get(vrank, ()))

    def hear(self, told: Mapping[int, bytes]) -> dict[int, Bad]:
        """Take in what the tasks of a committed step have told; returns what is new. WireError."""
        news: dict[int, Bad] = {}
        for vrank, data in sorted(told.items()):
            try:
                bad = _decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise WireError(f"what was told of bad records cannot be read: {error}") from None
            if any(not 0 <= record < self.length for record in bad):
                raise WireError(f"records {sorted(bad)} are told of, of {self.length}")
            news[vrank] = {r: why for r, why in bad.items() if r not in self.known(vrank)}
            self.turn[vrank] = tuple(sorted({*self.turn.get(vrank, ()), *news[vrank]}))
        return {vrank: bad for vrank, bad in news.items() if bad}

    @property
    def waiting(self) -> set[int]:
        """Return the records that all will leave out after the script's present step."""
        return {record for told in self.turn.values() for record in told} - set(self.records)

    def settle(self, step: int) -> None:
        """Let all leave out from now on what was told in this step of the script."""
        for record in sorted(self.waiting):
            self.records[record] = step
        self.turn.clear()


def over_budget(found: Sequence[tuple[int, str]], total: int, most: int) -> str:
    """Say why the job stops: with these records there are `total`, more than it may leave out."""
    record, why = found[0]
    return (
        f"record {record} of the dataset {why}; with it {total} records are bad, and the job may "
        f"leave out {most}: restore the data (`holdfast data verify` says what differs), or allow "
        "more with --bad-samples-max"
    )
