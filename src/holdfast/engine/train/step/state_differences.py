"""Finds the differences between workers' states, and decides whether the script has caused them.

Plain values (rates, counters, flags, `job.values`, modules' attributes, samples of the dataset) are
compared now and then, and can only differ where the script treats workers differently: that ends
the job with a sentence. Where only tensors differ, a machine may be at fault; but not if most of
them do and no worker has a majority on its side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.engine.core.errors import ScriptFault, WireError
from holdfast.engine.core.step.audit import judge
from holdfast.engine.core.step.rulings import UPDATES
from holdfast.engine.core.types import WorkerId

NUMBERS_MAX = 3  # numbers of the script that are named
# How names of texts that describe the data begin.
DATA = ("sample ", "place ", "the dataset's ")
SAME_DATA = (
    "datasets must hold the same samples in the same order on all workers, and on each start of "
    "the job; sort what a directory lists, split and shuffle after holdfast.join() or with a "
    "generator of a fixed seed, and derive a sample from its index only, not from calls or epochs "
    "that a new worker has missed"
)
SHARED_MIN = 0.5  # part of all tensors: a machine's fault does not change more of them at once


def explain(
    told: Mapping[WorkerId, bytes], step: int, before: Collection[str] = ()
) -> tuple[str, ...]:
    """Return which tensors differ. ScriptFault if the script is the cause.

    `told`: each worker's description of its state. `before`: the tensors that differed the last
    time. A flipped bit changes one tensor, and not the same one again; a script's error does.
    """
    states = {worker: _read(data) for worker, data in told.items()}
    paths = {path: None for each in states.values() for path in each.plain}
    for path in paths:
        texts = {worker: each.plain.get(path, "missing") for worker, each in states.items()}
        if len(set(texts.values())) > 1:
            raise ScriptFault(_describe_uneven(path, texts, step))
    names = [name for each in states.values() for name in each.tensors]
    every = list(dict.fromkeys(names))
    unlike = [n for n in every if len({each.tensors.get(n) for each in states.values()}) > 1]
    digests = {w: hash(tuple(each.tensors.get(n, 0) for n in unlike)) for w, each in states.items()}
    again = any(name in before for name in unlike)
    judgement = judge(digests)
    if judgement.wrong and (again or not _are_trained(unlike, states)):
        _check_numbers(states, judgement.wrong, unlike, step)
    many = len(unlike) > SHARED_MIN * len(every)
    if unlike and judgement.right is None and (many or again):
        once_more = " once more, as memory that fails rarely does" if again and not many else ""
        raise ScriptFault(
            f"{summarize(unlike)} differ between workers at step {step}{once_more}: {UPDATES}"
        )
    return tuple(unlike)


def summarize(names: Sequence[str]) -> str:
    """Name the first one, and the number of further ones."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _describe_uneven(path: str, texts: Mapping[WorkerId, str], step: int) -> str:
    first, *others = sorted(texts)
    other = next(worker for worker in others if texts[worker] != texts[first])
    what = f"{path} is {texts[first]} on worker {first} and {texts[other]} on worker {other}"
    if path.startswith(DATA):
        return f"{what}, at step {step}: {SAME_DATA}"
    return (
        f"{what}, at step {step}: every worker must set it alike, from step.loss, job.values or "
        "job.agree(...), not from a batch's own loss, a clock, job.worker, job.is_leader, or a "
        "variable that is fresh on a worker that joins (keep it in job.values)"
    )


def _are_trained(unlike: Sequence[str], states: Mapping[WorkerId, _Description]) -> bool:
    """Return whether an optimizer updates one of these tensors, or only one tensor differs.

    Where a machine computes wrongly or its memory fails, the difference is not exactly an
    average of weights.
    """
    trained = {name for each in states.values() for name in each.trained}
    return len(unlike) == 1 or any(name.partition(".")[0] in trained for name in unlike)


def _check_numbers(
    states: Mapping[WorkerId, _Description],
    wrong: Sequence[WorkerId],
    unlike: Sequence[str],
    step: int,
) -> None:
    """Raise ScriptFault if the wrong workers lack a number of the script that steps change.

    It is the same on all other workers.
    """
    first, *others = [each.numbers for worker, each in states.items() if worker not in wrong]
    theirs = states[wrong[0]].numbers
    found = [
        f"{path} ({theirs[path][0]} there, {text} elsewhere)"
        for path, (text, has_changed) in sorted(first.items(), key=lambda item: _depth(item[0]))
        if has_changed and path in theirs and theirs[path][0] != text
        if others and all(each.get(path, ("",))[0] == text for each in others)
    ]
    if found:
        do = "does" if len(found) == 1 else "do"
        raise ScriptFault(
            f"{summarize(unlike)} of worker {wrong[0]} differ from those of the other workers at "
            f"step {step}, and so {do} {', '.join(found[:NUMBERS_MAX])}: a worker that joins lacks "
            "what steps have changed in variables of the script; keep them in job.values, or in an "
            "object that is named in job.protect(...)"
        )


def _depth(path: str) -> int:
    """Return the distance of a value from its variable; the nearest values are named."""
    return path.count(".") + path.count("[")


@dataclass(frozen=True, slots=True)
class _Description:
    """Describes a worker's state: plain values, digests of tensors, and own numbers.

    `numbers`: by path, the text, and whether it has changed since the worker's first step.
    `trained`: names of the protected modules that an optimizer updates.
    """

    plain: dict[str, str]
    tensors: dict[str, int]
    numbers: dict[str, tuple[str, bool]]
    trained: list[str]


_decode = msgspec.msgpack.Decoder(
    tuple[list[tuple[str, str]], list[tuple[str, int]], list[tuple[str, str, bool]], list[str]]
).decode


def _read(data: bytes) -> _Description:
    try:
        plain, tensors, numbers, trained = _decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"what another worker tells of its state is malformed: {error}") from None
    kept = {path: (text, has_changed) for path, text, has_changed in numbers}
    return _Description(dict(plain), dict(tensors), kept, trained)
