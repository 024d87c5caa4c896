"""Finds the differences between workers' states, and decides whether the script has caused them.

Plain values (rates, counters, flags, `job.values`, modules' attributes, samples of the dataset) are
compared now and then, and can only differ where the script treats workers differently: that ends
the job with a sentence. Where only tensors differ, a machine may be at fault; but not if most of
them do and no worker has a majority on its side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.core.errors import ScriptFault, WireError
from holdfast.core.step.audit import judge
from holdfast.core.step.rulings import UPDATES
from holdfast.core.types import WorkerId

SHARED_MIN = 0.5  # part of all tensors: a machine's fault does not change more of them at once


def explain(
    told: Mapping[WorkerId, bytes], step: int, before: Collection[str] = ()
) -> tuple[str, ...]:
    """Return which tensors differ. ScriptFault if the script is the cause.

    `told`: each worker's description of its state. `before`: the tensors that differed the last
    time. A flipped bit changes one tensor, and not the same one again; a script's error does.
    """
    states = {worker: _read(data) for worker, data in told.items()}
    paths = {path: None for plain, _ in states.values() for path in plain}
    for path in paths:
        texts = {worker: plain.get(path, "missing") for worker, (plain, _) in states.items()}
        if len(set(texts.values())) > 1:
            raise ScriptFault(_describe_uneven(path, texts, step))
    names = [name for _, tensors in states.values() for name in tensors]
    every = list(dict.fromkeys(names))
    unlike = [n for n in every if len({each.get(n) for _, each in states.values()}) > 1]
    digests = {w: hash(tuple(each.get(n, 0) for n in unlike)) for w, (_, each) in states.items()}
    many = len(unlike) > SHARED_MIN * len(every)
    again = any(name in before for name in unlike)
    if unlike and judge(digests).right is None and (many or again):
        once_more = " once more, as memory that fails rarely does" if again and not many else ""
        raise ScriptFault(
            f"{summarize(unlike)} differ between workers at step {step}{once_more}: {UPDATES}"
        )
    return tuple(unlike)


def summarize(names: Sequence[str]) -> str:
    """Name the first one, and the number of the others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _describe_uneven(path: str, texts: Mapping[WorkerId, str], step: int) -> str:
    first, *others = sorted(texts)
    other = next(worker for worker in others if texts[worker] != texts[first])
    what = f"{path} is {texts[first]} on worker {first} and {texts[other]} on worker {other}"
    if path.startswith("sample "):
        return (
            f"{what}, at step {step}: datasets must hold the same samples in the same order on all "
            "workers; sort what a directory lists, split after holdfast.join(), and derive a "
            "sample from its index only, not from calls or epochs that a new worker has missed"
        )
    return (
        f"{what}, at step {step}: every worker must set it alike, from step.loss, job.values or "
        "job.agree(...), not from a batch's own loss, a clock, job.worker, job.is_leader, or a "
        "variable that is fresh on a worker that joins (keep it in job.values)"
    )


def _read(data: bytes) -> tuple[dict[str, str], dict[str, int]]:
    try:
        plain, tensors = msgspec.msgpack.decode(
            data, type=tuple[list[tuple[str, str]], list[tuple[str, int]]]
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"what another worker tells of its state is malformed: {error}") from None
    return dict(plain), dict(tensors)
