"""Knows how far each shard of a server is, and decides what a message changes.

The rows of a shard after n updates are a function of the job: whoever sends update n sends the same
bits. So replicas need neither an order among them nor a leader. A server applies each update once
and in order, and answers for any version that it still knows: it keeps the old values of the rows
that its last updates changed. A shard is bare until its rows have come from somewhere: first
values are a copy, too, as of no update. It does not know rows, sockets or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.engine.core.errors import assert_never, require

BARE = -1  # stands for the version of a shard that has no rows yet
WINDOW = 16  # updates that can be undone, so that reads of earlier versions are answered
AHEAD_MAX = 256  # updates kept while earlier ones are missing


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """The rows of update `number` have come for these shards; the driver keeps them as `token`."""

    number: int
    shards: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class CopyOffered:
    """Rows of these shards, as they were after `version` updates or more, are available elsewhere.

    `replaces`: as in CopyArrived.
    """

    shards: tuple[int, ...]
    version: int
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class CopyArrived:
    """A copy of a shard, as it was after `version` updates, is complete.

    `replaces`: the job has returned to a checkpoint, or to its first step, so later rows are
    dropped.
    """

    shard: int
    version: int
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """Copies of these shards will not come."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardsGivenUp:
    """Rows of these shards are wrong, or a copy replaces them: the shards are bare from now on."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardsChosen:
    """The server must hold these shards, because the number of servers has changed.

    New ones are bare; the rows of all other shards are gone.
    """

    shards: tuple[int, ...]


HoldingsEvent = (
    UpdateArrived | CopyOffered | CopyArrived | CopyFailed | ShardsGivenUp | ShardsChosen
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Apply the update kept as `token` to these shards."""

    number: int
    shards: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class BeginCopies:
    """Get copies of these shards. For each, CopyArrived or CopyFailed follows."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdoptCopy:
    """Use the copy of a shard that has arrived, and forget what undoes its earlier updates."""

    shard: int


@dataclass(frozen=True, slots=True)
class DropShards:
    """Forget the rows of these shards, and whatever undoes their updates."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetUpdate:
    """Drop the update `token`: no shard needs it any more."""

    token: int


HoldingsEffect = ApplyUpdate | BeginCopies | AdoptCopy | DropShards | ForgetUpdate


@dataclass(frozen=True, slots=True)
class ShardStanding:
    """Compares the versions of some shards with the version that a read asks for.

    `behind`: shards with the version that they have, or BARE. `past`: shards whose rows as of that
    version are no longer known. `copying`: shards whose rows are on their way.
    """

    behind: tuple[tuple[int, int], ...] = ()
    past: tuple[int, ...] = ()
    copying: tuple[int, ...] = ()

    @property
    def can_serve(self) -> bool:
        """Return whether all rows can be read as of the version."""
        return not (self.behind or self.past or self.copying)


class Holdings:
    """Decides for the shards of one server; `handle` is the only mutator."""

    def __init__(self, shards: Iterable[int], window: int = WINDOW) -> None:
        self._window = window
        self._versions = dict.fromkeys(shards, BARE)
        self._floors = dict(self._versions)
        self._copying: set[int] = set()
        # Updates that came before an earlier one: by number, which shards still need them.
        self._ahead: dict[int, list[UpdateArrived]] = {}

    def handle(self, event: HoldingsEvent) -> list[HoldingsEffect]:
        """Apply one event; return effects in order."""
        effects: list[HoldingsEffect] = []
        match event:
            case UpdateArrived():
                effects = self._update(event)
            case CopyOffered():
                effects = self._begin_copies(event)
            case CopyArrived():
                effects = self._adopt(event)
            case CopyFailed(shards):
                self._copying -= set(shards)
                effects = self._catch_up(self._pick_known(shards))
            case ShardsGivenUp(shards):
                effects = self._drop(self._pick_known(shards))
            case ShardsChosen(shards):
                effects = self._choose(shards)
            case _:
                assert_never(event)
        return effects

    def judge(self, version: int, shards: Sequence[int]) -> ShardStanding:
        """Return the state of these shards for a read as of `version`; unknown ones are past."""
        behind, past, copying = [], [], []
        for shard in shards:
            if shard not in self._versions or version < self._floors[shard]:
                past.append(shard)
            elif version > self._versions[shard]:
                if shard in self._copying:
                    copying.append(shard)
                else:
                    behind.append((shard, self._versions[shard]))
        return ShardStanding(tuple(behind), tuple(past), tuple(copying))

    def judge_span(self, oldest: int, newest: int, shards: Sequence[int]) -> ShardStanding:
        """Return the state of these shards for reads as of all versions from `oldest` to `newest`.

        `past` names the shards that cannot be read as of `oldest`; the other lists are for
        `newest`.
        """
        past = self.judge(oldest, shards).past
        return replace(self.judge(newest, shards), past=past)

    def is_held(self, shard: int) -> bool:
        """Return whether a shard is on this server, bare or not."""
        return shard in self._versions

    def is_wanted(self, copy: CopyArrived) -> bool:
        """Return whether a shard's rows are to be those of a copy."""
        shard, version = copy.shard, copy.version
        if shard not in self._versions:
            return False
        goes_back = copy.replaces and version < self._floors[shard]
        return version > self._versions[shard] or goes_back

    def version(self, shard: int) -> int:
        """Return the number of updates of a shard, or BARE."""
        return self._versions[shard]

    @property
    def floor(self) -> int:
        """Return the earliest version that some shard can be read as of."""
        return min((floor for floor in self._floors.values() if floor > BARE), default=0)

    def check(self) -> None:
        """Assert every invariant."""
        for shard, version in self._versions.items():
            floor = self._floors[shard]
            require(BARE <= floor <= version, f"shard {shard}: floor {floor} of version {version}")
            require(version - floor <= self._window, f"shard {shard} keeps too many old values")
        require(len(self._ahead) <= AHEAD_MAX, "updates pile up")
        waiting = [shard for each in self._ahead.values() for u in each for shard in u.shards]
        require(all(s in self._versions for s in waiting), "an update waits for a foreign shard")

    # ------------------------------------------------------------ one event

    def _pick_known(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Return the shards that this server holds, of the given ones."""
        return tuple(shard for shard in shards if shard in self._versions)

    def _update(self, event: UpdateArrived) -> list[HoldingsEffect]:
        number, due, later = event.number, [], []
        kept = {shard for each in self._ahead.get(number, ()) for shard in each.shards}
        for shard in self._pick_known(event.shards):
            if self._is_due(shard, number):
                due.append(shard)
            elif self._versions[shard] < number and shard not in kept:
                later.append(shard)
        effects: list[HoldingsEffect] = []
        if due:
            effects += self._apply(number, tuple(due), event.token)
        if later:
            waiting = UpdateArrived(number, tuple(later), event.token)
            self._ahead.setdefault(number, []).append(waiting)
        else:
            effects.append(ForgetUpdate(event.token))
        return effects + self._catch_up(tuple(due)) + self._shorten()

    def _is_due(self, shard: int, number: int) -> bool:
        return BARE < self._versions[shard] == number - 1 and shard not in self._copying

    def _apply(self, number: int, shards: tuple[int, ...], token: int) -> list[HoldingsEffect]:
        for shard in shards:
            self._versions[shard] = number
            self._floors[shard] = max(self._floors[shard], number - self._window)
        return [ApplyUpdate(number, shards, token)]

    def _catch_up(self, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        """Apply updates of these shards that have waited for earlier ones."""
        effects: list[HoldingsEffect] = []
        for number in sorted(self._ahead):
            left: list[UpdateArrived] = []
            for each in self._ahead[number]:
                due = tuple(s for s in each.shards if s in shards and self._is_due(s, number))
                if due:
                    effects += self._apply(number, due, each.token)
                rest = tuple(s for s in each.shards if self._versions[s] < number)
                if rest:
                    left.append(UpdateArrived(number, rest, each.token))
                else:
                    effects.append(ForgetUpdate(each.token))
            self._keep(number, left)
        return effects

    def _keep(self, number: int, left: list[UpdateArrived]) -> None:
        if left:
            self._ahead[number] = left
        else:
            self._ahead.pop(number, None)

    def _shorten(self) -> list[HoldingsEffect]:
        """Drop the earliest updates when too many wait; readers give them again."""
        effects: list[HoldingsEffect] = []
        while len(self._ahead) > AHEAD_MAX:
            effects += [ForgetUpdate(each.token) for each in self._ahead.pop(min(self._ahead))]
        return effects

    def _begin_copies(self, event: CopyOffered) -> list[HoldingsEffect]:
        """Begin to copy shards that lack the version, unless a copy is on its way."""
        idle = [s for s in self._pick_known(event.shards) if s not in self._copying]
        standing = self.judge(event.version, idle)
        wanted = (*(s for s, _ in standing.behind), *(standing.past if event.replaces else ()))
        self._copying |= set(wanted)
        return [BeginCopies(wanted)] if wanted else []

    def _adopt(self, event: CopyArrived) -> list[HoldingsEffect]:
        shard = event.shard
        self._copying.discard(shard)
        effects: list[HoldingsEffect] = []
        if self.is_wanted(event):
            self._versions[shard] = self._floors[shard] = event.version
            effects.append(AdoptCopy(shard))
        return effects + self._catch_up(self._pick_known([shard]))

    def _choose(self, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        """Hold these shards from now on, and drop updates that only other shards wait for."""
        self._versions = {shard: self._versions.get(shard, BARE) for shard in shards}
        self._floors = {shard: self._floors.get(shard, BARE) for shard in shards}
        self._copying &= set(shards)
        effects: list[HoldingsEffect] = []
        for number, waiting in list(self._ahead.items()):
            left: list[UpdateArrived] = []
            for each in waiting:
                if still := self._pick_known(each.shards):
                    left.append(UpdateArrived(number, still, each.token))
                else:
                    effects.append(ForgetUpdate(each.token))
            self._keep(number, left)
        return effects

    def _drop(self, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        for shard in shards:
            self._versions[shard] = self._floors[shard] = BARE
        return [DropShards(shards)] if shards else []
