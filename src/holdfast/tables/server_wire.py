"""Describes the messages between workers and servers of tables.

A request and its answer are messages of net/peer_stream.py; arrays follow them as plain bytes, in
this machine's order, with the sizes that the message names. No message is ever unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeAlias

import msgspec
import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_stream import UNLIMITED, SendRate
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.tables.core.holdings import ShardStanding
from holdfast.tables.row_optimizers import SGD, Adagrad, LazyAdam, RowOptimizer, RowWiseAdagrad
from holdfast.tables.table_shape import TableShape

MAGIC = b"htable\0\5"
ARRAY_BYTES_MAX = 1 << 32  # the most in a message
TABLES_MAX = 1 << 14  # the most in a group
HALF_MAX = 65504.0  # the largest float16
NEWEST = -1  # stands for the newest version of a shard
RULES = {rule.__name__: rule for rule in (SGD, Adagrad, RowWiseAdagrad, LazyAdam)}


class TableGroup(msgspec.Struct, frozen=True, array_like=True):
    """Describes tables that one optimizer updates, by the same words on every worker."""

    name: str
    tables: tuple[TableShape, ...]
    rule: str
    #: The fields of the rule, with their values.
    settings: tuple[tuple[str, tuple[float, ...]], ...]
    #: Number of updates that reads do not know yet.
    staleness: int = 0

    def make_rule(self) -> RowOptimizer:
        """Return the optimizer. UserError, WireError."""
        if self.rule not in RULES:
            raise WireError(f"no optimizer of rows is named {self.rule!r}")
        given = {n: v[0] if len(v) == 1 else v for n, v in self.settings}
        try:
            return RULES[self.rule](**given)  # type: ignore[arg-type]
        except TypeError as error:
            raise WireError(f"the optimizer {self.rule} cannot be made: {error}") from None

    @property
    def shard_bytes(self) -> int:
        """Return the bytes that one shard of all tables takes. UserError, WireError."""
        rule = self.make_rule()
        per_row = {
            s.dim: 4 * (s.dim + sum(width for width, _ in rule.slots(s.dim).values()))
            for s in self.tables
        }
        keys = 3 * 8  # a key, and the two numbers of its uses
        return sum(s.shard_rows * (per_row[s.dim] + keys * bool(s.keyed)) for s in self.tables)


def describe_rule(rule: RowOptimizer) -> tuple[str, tuple[tuple[str, tuple[float, ...]], ...]]:
    """Return a rule's name and its settings, as a TableGroup has them."""
    found = []
    for each in fields(rule):
        value = getattr(rule, each.name)
        values = value if isinstance(value, tuple) else (value,)
        found.append((each.name, tuple(float(v) for v in values)))
    return type(rule).__name__, tuple(found)


class BeginGroup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks a server to hold these shards of a group's tables alone.

    Only a greater `layout` than the last one changes its shards. New shards are bare: their rows
    have to come.
    """

    group: TableGroup
    shards: tuple[int, ...]
    layout: int = 0


class ReadRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for rows as of a version. The keys follow: `counts` of each table, int64.

    The answer has the fingerprints of all these shards, and after them those of the `compared`
    ones. `as_half`: the rows are sent as float16.
    """

    group: str
    version: int
    shards: tuple[int, ...]
    counts: tuple[int, ...]
    as_half: bool = False
    compared: tuple[int, ...] = ()


class GiveUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gives update `number` of some shards.

    Keys of all tables follow (`counts`, int64), then their summed gradients (float32). `steps`,
    `rates`: each table's own count of updates and the rate to use. `oldest`: the earliest version
    that the next steps may read; the answer has shards as past that cannot be read as of it.
    `writes`: the script gives rows these values, which are sent in place of gradients.
    """

    group: str
    number: int
    shards: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    rates: tuple[float, ...]
    oldest: int
    writes: bool = False


class FetchShards(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Orders a server to copy shards from the one at `source` (HOST:PORT).

    It leaves out shards that have had `version` updates.
    """

    group: str
    source: str
    shards: tuple[int, ...]
    version: int


class ListKeys(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks which keys of a table have rows as of a version; they follow the answer.

    Only keys at the places `first` to `stop` - 1 of each shard count. The answer has fingerprints,
    as the answer to ReadRows has.
    """

    group: str
    version: int
    shards: tuple[int, ...]
    table: int
    first: int
    stop: int
    compared: tuple[int, ...] = ()


class CopyShard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for all rows of a shard; the arrays follow the answer, which has their fingerprint.

    It has them as they were after `version` updates; NEWEST: as they are now.
    """

    group: str
    shard: int
    version: int = NEWEST


class DropShard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Orders a server to drop a shard, if this is still its fingerprint after `version` updates.

    Other servers have computed another one, which is right.
    """

    group: str
    shard: int
    version: int
    fingerprint: int


class ResetRows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Orders a server to give rows of these shards their first values.

    Shards whose first values can still be read stay as they are.
    """

    group: str
    shards: tuple[int, ...]


class SaveShards(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Orders a server to save shards as they were after `version` updates.

    They become share `writer` of the checkpoint of `step`, whose other shares have the same token.
    """

    group: str
    version: int
    shards: tuple[int, ...]
    step: int
    token: str
    writer: int


class LoadShards(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Orders a server to load shards from the checkpoint of `step`.

    Shards that can be read as of `version`, which the checkpoint has, stay as they are.
    """

    group: str
    step: int
    shards: tuple[int, ...]
    version: int


Request: TypeAlias = (
    BeginGroup
    | ReadRows
    | GiveUpdate
    | FetchShards
    | ListKeys
    | CopyShard
    | DropShard
    | ResetRows
    | SaveShards
    | LoadShards
)


Order: TypeAlias = FetchShards | DropShard | ResetRows | SaveShards | LoadShards


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Answers a request. `problem`: one sentence, or empty. `sizes`: how many numbers of each
    array after it.

    `unknown`: the server does not know the group, so BeginGroup must come first. `version`: of the
    shard that was asked for. `dropped`: shards that the server has dropped since its last answer of
    this kind, as its memory had changed by itself. `fingerprints`: of the shards that were asked
    for, equal on all servers that hold the same rows. `is_full`: the problem is that the server has
    no memory for the tables, or for more of their rows if it knows the group. The other fields are
    as in ShardStanding.
    """

    problem: str = ""
    unknown: bool = False
    behind: tuple[tuple[int, int], ...] = ()
    past: tuple[int, ...] = ()
    copying: tuple[int, ...] = ()
    version: int = 0
    sizes: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    fingerprints: tuple[int, ...] = ()
    is_full: bool = False

    @property
    def standing(self) -> ShardStanding:
        """Return the server's number of updates."""
        return ShardStanding(self.behind, self.past, self.copying)


def send_array(channel: socket.socket, array: torch.Tensor, rate: SendRate = UNLIMITED) -> None:
    """Send a contiguous array's bytes, as fast as a rate allows. OSError."""
    if array.numel():
        rate.send(channel, memory_of(array))


def receive_array(
    channel: socket.socket, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Receive an array. OSError; WireError for sizes that no message has."""
    check_size(shape, dtype)
    return fill_array(channel, torch.empty(*shape, dtype=dtype))


def round_to_half(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as float16: each number off by at most 1/2048 of itself, or 2^-25 near 0.

    Numbers beyond 65,504 become that, as in fbgemm's quantized communication.
    """
    return rows.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)


def fill_array(channel: socket.socket, array: torch.Tensor) -> torch.Tensor:
    """Receive the bytes of a contiguous array, and return it. OSError."""
    if array.numel():
        peer_stream.fill(channel, memory_of(array))
    return array


def check_size(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """Raise WireError for an array that is too large, or has a negative size."""
    size = dtype.itemsize
    for each in shape:
        size *= each
    if any(each < 0 for each in shape) or size > ARRAY_BYTES_MAX:
        raise WireError(f"an array of shape {list(shape)}, where 4 GiB are the most")


def problem_of(error: Exception) -> Answer:
    """Return the answer to a request that is refused."""
    assert isinstance(error, UserError | WireError)
    return Answer(problem=str(error))
