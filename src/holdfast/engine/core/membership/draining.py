"""Chooses which of the nodes that fail their checks are drained now. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def choose_drains(
    failing: Sequence[tuple[str, str]], share_max: float = 0.25
) -> tuple[tuple[str, ...], str]:
    """Choose which nodes to drain, and say why not the others.

    `failing`: all nodes in a stable order, each with the check that it fails, or "". At most
    `share_max` of the nodes are drained, but one of two or more. When more nodes than that fail the
    same check, they share the fault, such as that of a file server: draining them all would end the
    job and mend nothing.
    """
    wanted = [(node, check) for node, check in failing if check]
    most = max(1, int(share_max * len(failing))) if len(failing) > 1 else 0
    counts = Counter(check for _, check in wanted)
    own = [node for node, check in wanted if counts[check] <= most]
    shared = [check for check, count in counts.items() if count > most]
    if shared:
        why = f"{shared[0]} fails on {counts[shared[0]]} of {len(failing)} nodes: it is shared"
    elif len(own) > most:
        why = f"at most {most} of {len(failing)} nodes at a time"
    else:
        why = ""
    return tuple(own[:most]), why
