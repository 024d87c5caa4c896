"""Describes a dataset in a few texts, by which workers find that theirs are not the same.

A text is the dataset's length, a setting of its batches, the order of a Subset, or the digest of a
sample. Reading the samples changes no random generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import Subset

from holdfast.engine.train.data.batch_loading import limit_to_one_thread
from holdfast.engine.train.data.map_style import load_samples
from holdfast.engine.train.data.random_streams import enter_stream, key_apart, stream_seed
from holdfast.engine.train.data.sample_digest import content_print

SAMPLES_COMPARED = 2  # at a time
PLACES_COMPARED = 4
SUBSETS_MAX = 8  # one inside the other
Facts = dict[str, str]  # texts by names, which begin as step/state_differences.DATA says


def describe_data(
    dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, step: int
) -> Facts:
    """Return the length of a dataset, its order if it is a Subset, and digests of a few samples.

    `step`: chooses the samples, and keys their random numbers. Samples that cannot be read are left
    out: that may be the fault of this machine.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    found = {"the dataset's length": str(length), **_describe_subsets(dataset)}
    with key_apart(seed, step, "compared"):
        for i in range(SAMPLES_COMPARED if length else 0):
            index = stream_seed(seed, step, i, "compared") % length
            with contextlib.suppress(Exception):
                found[f"sample {index} of the dataset"] = digest_sample(
                    dataset, collate_fn, index, (seed, step, i)
                )
    return found


def find_difference(mine: Facts, theirs: Facts) -> str:
    """Return the first name that has other texts in two descriptions; "" if there is none."""
    return next((name for name in mine if theirs.get(name, mine[name]) != mine[name]), "")


def digest_sample(
    dataset: Any, collate_fn: Callable[[list[Any]], Any], key: Any, stream: tuple[int, int, int]
) -> str:
    """Return the digest of a sample, with generators keyed by (seed, step, number)."""
    enter_stream(*stream, "compared")
    with limit_to_one_thread():
        return f"{content_print(collate_fn(load_samples(dataset, [key]))):016x}"


def print_sample(
    dataset: Any, collate_fn: Callable[[list[Any]], Any], key: Any, stream: tuple[int, int, int]
) -> str:
    """Return the digest of a sample, or the name of the error that its task will meet."""
    try:
        return digest_sample(dataset, collate_fn, key, stream)
    except Exception as error:  # noqa: BLE001 - the task that needs it will meet it
        return type(error).__name__


def _describe_subsets(dataset: Any) -> Facts:
    """Describe the places of a Subset, also of those inside it."""
    found: Facts = {}
    for level in range(SUBSETS_MAX):
        if not isinstance(dataset, Subset):
            break
        try:
            indices = np.asarray(dataset.indices, np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            break  # its keys are no numbers
        which = "the Subset" if not level else f"the Subset {level} levels inside"
        for place, index in enumerate(indices[:PLACES_COMPARED].tolist()):
            found[f"place {place} of {which}"] = f"sample {index}"
        digest = xxhash.xxh3_64_hexdigest(indices.astype("<i8").tobytes())
        found[f"the dataset's order, in {which},"] = digest
        dataset = dataset.dataset
    return found
