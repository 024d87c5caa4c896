"""Reads samples and compares them with the dataset's index, in the process that reads them.

A sample that differs, or whose reading raises, is read again, then from each mirror. After that the
reader gives up, or takes a substitute and reports it. Invariant: the result of `load` is a function
of the indices, of the records known to be bad and of those it reports as bad: other failed attempts
leave no trace, not even in the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.engine.core.errors import Damaged, UserError, first_line
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.state.store.data_index import SampleIndex, read_index
from holdfast.engine.train.data.datasets import is_plain_dataset, load_samples
from holdfast.engine.train.data.quarantine import REASON_CHARS_MAX, Bad, reason_to_stop, replace_bad
from holdfast.engine.train.data.sample_digest import read_sample, sample_digest

READS = 2  # attempts per sample from the dataset itself; each mirror is asked once


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Configures how the records of a dataset are verified, and how bad ones are handled."""

    index: SampleIndex | None = None
    #: Other datasets of the same samples.
    mirrors: tuple[Any, ...] = ()
    quarantines: bool = False
    #: Records that may be quarantined.
    most: int = 0

    @property
    def can_retry(self) -> bool:
        """Return whether another attempt is possible after a dataset has raised."""
        return bool(self.mirrors) or self.quarantines


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Describes the records that a task has read in the end, and the faults of bad ones."""

    used: tuple[int, ...]
    bad: Bad = field(default_factory=dict)
    healed: tuple[str, ...] = ()


def checks_of(spec: JobSpec, index: Any, mirrors: Sequence[Any], on_error: str) -> Checks:
    """Return the checks of a job's samples; see Job.batches. UserError."""
    if on_error not in ("raise", "quarantine"):
        raise UserError(f'on_error={on_error!r}: give "raise" or "quarantine"')
    quarantines = on_error == "quarantine"
    for flag, value in (
        ("--backup", spec.stragglers.backup),
        ("--audit", spec.silent_errors.audit),
    ):
        if quarantines and value:
            raise UserError(
                f'on_error="quarantine" and {flag} {value} exclude each other: a worker that '
                "leaves out a record computes something else than others; set one of them off"
            )
    return Checks(
        index=None if index is None else read_index(index, SampleIndex),
        mirrors=tuple(mirrors),
        quarantines=quarantines,
        most=spec.data.bad_samples_max,
    )


class SampleReader:
    """Reads the samples of one dataset. `length`: how many it has."""

    def __init__(self, dataset: Any, length: int, checks: Checks | None = None) -> None:
        self.dataset = dataset
        self._length = length
        self._checks = checks or Checks()

    @property
    def is_plain(self) -> bool:
        """Return whether reading runs none of the script's code, so that it draws no numbers."""
        checked = self._checks.index or self._checks.can_retry
        return not checked and is_plain_dataset(self.dataset)

    def load(
        self, indices: list[int], known: frozenset[int], begin: Callable[[], None]
    ) -> tuple[list[Any], Reading]:
        """Return the samples of these indices, with substitutes for bad records, and a report.

        `begin` enters the random generators' stream. The dataset's exceptions pass through, unless
        another attempt is possible. UserError for a bad sample that must not be left out.
        """
        checks = self._checks
        if not (known or checks.index or checks.can_retry):  # the indices may be any keys
            begin()
            try:
                return load_samples(self.dataset, indices), Reading(used=tuple(indices))
            except Damaged as damage:
                raise _add_remedies(damage) from None
        raw = np.array(indices, dtype=np.int64)
        failed: dict[int, int] = {}  # failed attempts, by record
        bad: Bad = {}
        while True:
            used = replace_bad(raw, known | bad.keys(), self._length)[0].tolist()
            begin()
            try:
                samples, errors = self._read(used, failed, begin)
            except Damaged as damage:
                raise _add_remedies(damage) from None
            if not errors:
                break
            for record, error in errors.items():
                failed[record] = failed.get(record, 0) + 1
                if failed[record] == READS + len(self._checks.mirrors):
                    self._give_up(record, error, known, bad)
        healed = tuple(
            self._describe_healing(r, n) for r, n in sorted(failed.items()) if r not in bad
        )
        return samples, Reading(used=tuple(used), bad=bad, healed=healed)

    def check_first(self, name: str) -> None:
        """Raise UserError if the index is of another dataset: none of a few samples matches it."""
        index = self._checks.index
        if index is None:
            return
        if len(index) != self._length:
            raise UserError(
                f"the index is of {len(index)} samples but {name} has {self._length}: give the "
                "index of this dataset, or write it again with `holdfast data index`"
            )
        probes = sorted({0, self._length // 2, self._length - 1})
        errors = self._read(probes, {}, lambda: None)[1]
        differing = [each for each in errors.values() if isinstance(each, _Differs)]
        if len(probes) == len(differing) > 1:
            raise UserError(
                f"samples {', '.join(map(str, probes))} of {name} all differ from its index: give "
                "the index of this dataset. If its samples are random, make them so in collate_fn"
            )

    def _read(
        self, records: Sequence[int], failed: dict[int, int], begin: Callable[[], None]
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Read samples once; return them, and errors by record."""
        many = getattr(self.dataset, "__getitems__", None)
        if many and not failed:
            try:
                samples = many(list(records))
                return samples, self._find_differing(records, samples)
            except Exception:
                if not self._checks.can_retry:
                    raise
            begin()
        samples, errors = [], {}
        for record in records:
            try:
                samples.append(read_sample(self._place(failed.get(record, 0)), record))
            except Exception as error:
                if not self._checks.can_retry:
                    raise
                samples.append(None)
                errors[record] = error
        return samples, errors | self._find_differing(records, samples, errors)

    def _place(self, failures: int) -> Any:
        return self.dataset if failures < READS else self._checks.mirrors[failures - READS]

    def _find_differing(
        self, records: Sequence[int], samples: Sequence[Any], errors: Any = ()
    ) -> dict[int, Exception]:
        index = self._checks.index
        if index is None:
            return {}
        return {
            record: _Differs("differs from its index")
            for record, sample in zip(records, samples, strict=True)
            if record not in errors and sample_digest(sample) != index.digest(record)
        }

    def _give_up(self, record: int, error: Exception, known: frozenset[int], bad: Bad) -> None:
        """Record that a record is bad, or raise an error if it must not be left out."""
        mirrors = len(self._checks.mirrors)
        elsewhere = f", also in {mirrors} mirrors" if mirrors else ", also when it is read again"
        differs = isinstance(error, _Differs)
        why = str(error) if differs else f"raises {type(error).__name__}: {first_line(error)}"
        why = why[:REASON_CHARS_MAX] + elsewhere
        if not self._checks.quarantines:
            if isinstance(error, Damaged):
                raise _add_remedies(error) from None
            if not differs:
                raise error
            raise UserError(
                f"record {record} of {type(self.dataset).__name__} {why}: restore the data "
                "(`holdfast data verify` says what differs), give mirrors=, or "
                'on_error="quarantine"'
            )
        bad[record] = why
        total = len(known | bad.keys())
        if total > self._checks.most:
            raise UserError(reason_to_stop([(record, why)], total, self._checks.most))

    def _describe_healing(self, record: int, failures: int) -> str:
        where = "read again" if failures < READS else f"taken from mirror {failures - READS + 1}"
        return f"record {record} of {type(self.dataset).__name__} was not sound, and was {where}"


def _add_remedies(error: Damaged) -> UserError:
    """Return a verifying dataset's error with the user's remedies."""
    return UserError(f'{error}: restore it, give it mirrors, or on_error="quarantine"')


class _Differs(Exception):
    """Is raised when a sample differs from the index."""
