"""Checks what a simulated member uses of an exchange: pieces, records and finished sums.

Each message carries the names of its view, exchange and pieces, as its sender knows them. A member
that uses a message compares them with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.groups import What
from holdfast.lab.sim.wrong_bits import Violation


def check_piece(member: Key, wanted: tuple[Any, ...], stamp: tuple[Any, ...]) -> None:
    """Check that a message is of the view, and of the step or gather, in which it is used."""
    if stamp != wanted:
        raise Violation(f"worker {member} uses a message of {stamp} for {wanted}")


def check_record_range(member: Key, wanted: int, first: int) -> None:
    """Check that the records in a message follow those that the member has."""
    if first != wanted:
        raise Violation(f"worker {member} gets records from rank {first} on, and lacks {wanted}")


def check_records(
    member: Key, what: What, keys: Sequence[Key], held: int, records: Mapping[Key, Any]
) -> None:
    """Check that a member ends a gather with one record of each member."""
    if held != len(keys) or len(records) != held:
        raise Violation(
            f"worker {member} ends gather {what} with {held} records of {len(keys)} members, of "
            f"whom {len(records)} have given one"
        )


def check_total(member: Key, step: int, total: int, right: int) -> None:
    """Compare a member's sum with the fold of all members' contributions."""
    if total != right:
        raise Violation(f"worker {member} has summed step {step} otherwise than the tree does")
