"""Defines failure domains, which can take several nodes down at once, as labels `KEY=VALUE`.

`rack=r7` on two nodes says that both go when that rack goes. Labels of different keys are
different kinds of domains, and a node is in one of each kind at most.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.errors import UserError

LABEL_CHARACTERS_MAX = 256
LABELS_MAX = 8  # on one node

Domains = tuple[str, ...]  # sorted by key, at most one of each


def read_domains(labels: Iterable[str]) -> Domains:
    """Check labels, as people write them, and sort them. UserError."""
    found: dict[str, str] = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals and value) or len(label) > LABEL_CHARACTERS_MAX:
            example = "such as rack=r7"
            raise UserError(f"failure domain {label[:80]!r}: write it as KEY=VALUE, {example}")
        if found.setdefault(key, label) != label:
            raise UserError(f"failure domains {found[key]!r} and {label!r}: a node is in one {key}")
    if len(found) > LABELS_MAX:
        raise UserError(f"{len(found)} failure domains: a node has at most {LABELS_MAX}")
    return tuple(found[key] for key in sorted(found))


def join_labels(theirs: Domains, own: Domains) -> Domains:
    """Join labels from two sources; of one key `own` counts."""
    by_key = {label.partition("=")[0]: label for label in (*theirs, *own)}
    return tuple(by_key[key] for key in sorted(by_key))


def has_other_keys(known: Domains, told: Domains) -> bool:
    """Return whether `told` has a key that `known` has not."""
    keys = {label.partition("=")[0] for label in known}
    return any(label.partition("=")[0] not in keys for label in told)
