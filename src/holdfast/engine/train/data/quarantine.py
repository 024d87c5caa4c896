"""Keeps the quarantined records of a dataset, and chooses the records that replace them.

Must not know torch or workers. A worker that cannot read a record correctly uses a substitute and
reports the record together with its task's results, so every worker that has the step has the
report. From the script's next step on all leave the record out, whether they could read it or not.
Invariant: which records a task uses follows from its indices, from the records quarantined before
its step, and from its own report.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.engine.core.errors import UserError, WireError

REASON_CHARS_MAX = 200

Bad = dict[int, str]  # why a record was left out
_decode = msgspec.msgpack.Decoder(Bad).decode


def replace_bad(
    indices: NDArray[np.int64], bad: Collection[int], length: int
) -> tuple[NDArray[np.int64], set[int]]:
    """Replace each bad record by another one, far from it, that is not bad.

    Neighbours are often bad together, and one record should not stand in for all of them. Returns
    the records to use, and the bad records that were met on the way. UserError if all are bad.
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
    """Return a step that leads from each record through all records: about 0.6 of the length."""
    stride = max(1, length * 618 // 1000)
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride


def encode_bad(bad: Mapping[int, str]) -> bytes:
    """Encode the records that a task had to leave out; b"" if there are none."""
    return msgspec.msgpack.encode({r: bad[r] for r in sorted(bad)}) if bad else b""


class Quarantine:
    """Keeps the quarantined records of one dataset; `records` is a part of the job's state.

    `number`: which of the script's datasets it is, from 1 on. `most`: how many records of all
    datasets together may be quarantined before the job stops.
    """

    def __init__(self, number: int, length: int, records: dict[int, int], most: int) -> None:
        self.number = number
        self.length = length
        #: By record: the script's step in which it was found.
        self.records = records
        self.most = most
        # records reported in the script's present step, by vrank
        self.turn: dict[int, tuple[int, ...]] = {}

    def known_records(self, vrank: int) -> frozenset[int]:
        """Return the records that a virtual rank's task leaves out unread, also in later rounds."""
        return frozenset(self.records) | frozenset(self.turn.get(vrank, ()))

    def take_reports(self, told: Mapping[int, bytes]) -> dict[int, Bad]:
        """Take in the reports of a committed step's tasks; return new bad records. WireError."""
        news: dict[int, Bad] = {}
        for vrank, data in sorted(told.items()):
            try:
                bad = _decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise WireError(f"a report of bad records cannot be read: {error}") from None
            if any(not 0 <= record < self.length for record in bad):
                raise WireError(f"records {sorted(bad)} are told of, of {self.length}")
            news[vrank] = {r: why for r, why in bad.items() if r not in self.known_records(vrank)}
            self.turn[vrank] = tuple(sorted({*self.turn.get(vrank, ()), *news[vrank]}))
        return {vrank: bad for vrank, bad in news.items() if bad}

    @property
    def waiting(self) -> set[int]:
        """Return the records that all will leave out after the script's present step."""
        return {record for told in self.turn.values() for record in told} - set(self.records)

    def settle(self, step: int) -> None:
        """Quarantine the records that were reported in this step of the script."""
        for record in sorted(self.waiting):
            self.records[record] = step
        self.turn.clear()


def reason_to_stop(found: Sequence[tuple[int, str]], total: int, most: int) -> str:
    """Return the reason for the job's end: `total` records are bad, of `most` that may be."""
    record, why = found[0]
    return (
        f"record {record} of the dataset {why}; with it {total} records are bad, and the job may "
        f"leave out {most}: restore the data (`holdfast data verify` says what differs), or allow "
        "more with --bad-samples-max"
    )
