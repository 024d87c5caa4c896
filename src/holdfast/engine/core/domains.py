"""Defines failure domains, which can take several nodes down at once, as labels `KEY=VALUE`.

`rack=r7` on two nodes means that both are lost when that rack is lost. Labels of different keys are
different kinds of domains, and a node is in one of each kind at most. Nodes of one domain are also
near each other: paths order the kinds, so that workers can be compared by their places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TypeVar

from holdfast.engine.core.errors import UserError

LABEL_CHARACTERS_MAX = 256
LABELS_MAX = 8  # on one node

Domains = tuple[str, ...]  # sorted by key, at most one of each
#: A node's labels from the widest kind to the narrowest, then its name. The longer the beginning
#: that two paths share, the nearer their nodes.
Path = tuple[str, ...]
K = TypeVar("K")


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


def find_paths(nodes: Mapping[K, tuple[str, Domains]]) -> dict[K, Path]:
    """Return a path for each of these, from the name and the labels of its node."""
    turns = {kind: i for i, kind in enumerate(order_kinds(labels for _, labels in nodes.values()))}
    found: dict[K, Path] = {}
    for each, (name, labels) in nodes.items():
        found[each] = (*sorted(labels, key=lambda label: turns[_kind_of(label)]), name)
    return found


def order_kinds(nodes: Iterable[Domains]) -> list[str]:
    """Order the kinds of domains from the widest to the narrowest, by the labels of all nodes.

    A kind is narrower than another one if each of its domains lies within one domain of the other
    kind, and not the other way round. If neither is narrower, the kind whose domains have more
    nodes on average comes first, and else the kind whose key does.
    """
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)  # nodes of each label, by kind
    beside: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(
        lambda: defaultdict(Counter)
    )  # for each label, the labels of each other kind on the same nodes
    for labels, count in Counter(nodes).items():
        for label in labels:
            sizes[_kind_of(label)][label] += count
            for other in labels:
                beside[label][_kind_of(other)][other] += count

    def lies_within(kind: str, other: str) -> bool:
        every = sizes[kind].items()
        return all(list(beside[label][other].values()) == [size] for label, size in every)

    def count_wider(kind: str) -> int:
        near = beside[next(iter(sizes[kind]))]  # a wider kind is beside every label of this one
        return sum(lies_within(kind, each) and not lies_within(each, kind) for each in [*near])

    average = {kind: Fraction(found.total(), len(found)) for kind, found in sizes.items()}
    return sorted(sizes, key=lambda kind: (count_wider(kind), -average[kind], kind))


def _kind_of(label: str) -> str:
    return label.partition("=")[0]
