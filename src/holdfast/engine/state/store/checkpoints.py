"""Manages all checkpoints of one job in one storage: saving, finding, reading, retiring, scrubbing,
and collecting garbage.

Garbage is collected while checkpoints are saved. A save announces its base before it checks whether
that is still there, and a collector retires a checkpoint before it looks for announcements; so at
least one of the two notices the other. Scrubbing reads checkpoints again and again, slowly, to find
rot while it can still be repaired.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.engine.core.errors import Damaged, UserError, WorldError
from holdfast.engine.core.replica.retention import Retention, Saved, SaveOrder, choose_kept
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.store.checkpoint_reading import Bad, Rotten, load, verify
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import (
    INTENT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFESTS,
    PACKS,
    PARTS,
    SAVING,
    SUSPECT,
    Entry,
    Intent,
    Manifest,
    decode,
    decode_intent,
    invalidation_name,
    is_withdrawn,
    manifest_name,
    step_of,
    suspect_name,
    token_of,
)
from holdfast.engine.state.store.saving import Item, Known, Saving
from holdfast.engine.state.store.storage import Missing, Storage, has_ended, name_scope, read_all
from holdfast.engine.state.store.volumes import VolumeStorage

Targets = Callable[[Manifest], Sequence[tuple[Entry, memoryview]]]  # where to put which entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Counts the objects that garbage collection has removed."""

    steps: tuple[int, ...]
    packs: int
    freed_bytes: int


class Checkpoints:
    """Manages one job's checkpoints. `say` takes a line, once, on each untrusted object."""

    def __init__(self, storage: Storage, say: Callable[[str], None] = lambda line: None) -> None:
        self.storage = storage
        self._say = say
        # Steps of the unreadable checkpoints that were reported to `say`.
        self._told: set[int] = set()
        self._known: list[tuple[object, Known]] = []  # none or one

    # ------------------------------------------------------------ finding

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, the newest last."""
        found = [step_of(name) for name in self.storage.names(MANIFESTS)]
        return sorted(step for step in found if step is not None)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint. Missing; Damaged."""
        name = manifest_name(step)
        found = decode(read_all(self.storage, name, MANIFEST_BYTES_MAX), name)
        if found.step != step:
            raise Damaged(f"{name} is damaged: it is of step {found.step}")
        return found

    def verify(self, step: int, progress: Callable[[int], None] | None = None) -> list[Bad]:
        """Return the faults in a checkpoint's bytes. Missing; Damaged if its manifest is."""
        found = verify(self.storage, self.manifest(step), progress)
        for bad in found:
            self.suspect(bad.pack, str(bad))
        return found

    def suspect(self, pack: str, why: str) -> None:
        """Keep every save from now on from building upon what this pack holds."""
        with contextlib.suppress(WorldError):
            self.storage.put(suspect_name(pack), [why.encode()])

    @contextlib.contextmanager
    def reading(self) -> Iterator[Storage]:
        """Lend the storage; a pack with bytes that are found Rotten becomes suspect."""
        try:
            yield self.storage
        except Rotten as error:
            self.suspect(error.bad.pack, str(error))
            raise

    # ------------------------------------------------------------ reading

    def load(self, step: int, targets: Targets) -> Manifest:
        """Read what `targets` asks for of a checkpoint. Missing; Damaged."""
        manifest = self.manifest(step)
        with self.reading() as storage:
            load(storage, manifest, targets(manifest))
        return manifest

    def load_newest(self, targets: Targets) -> Manifest | None:
        """Load the newest checkpoint that can be read; return None if there is none at all.

        `say` receives a sentence about each newer one that cannot be read. UserError if there are
        some, all damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.load(step, targets)
            except WorldError as error:
                self._say(f"the checkpoint of step {step} is not used: {error}")
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints can be read: see the lines above, and "
                "`holdfast ckpt repair`"
            )
        return None

    # ------------------------------------------------------------ saving

    def begin(
        self,
        step: int,
        token: str = "",
        writer: int | None = None,
        view: ViewNumber = NO_VIEW,
    ) -> Saving:
        """Begin to save step `step`.

        If several writers save it together, all pass the same token, which no other save ever has.
        """
        base, known = self._base()
        saving = Saving(self.storage, step, token or secrets.token_hex(8), known, writer, view)
        saving.base = base
        saving.announce(known.packs)
        if base is not None and self.storage.size(manifest_name(base)) is None:
            # It was retired before we announced that we need it.
            saving.base, saving.known = None, Known()
        return saving

    def join(self, step: int, token: str, base: int | None) -> Saving:
        """Take part in a save that another process began, and write a part. Missing; Damaged."""
        return Saving(
            self.storage, step, token, Known() if base is None else self._held_chunks(base)
        )

    def save(self, step: int, items: Sequence[Item], about: dict[str, str]) -> Manifest:
        """Save a whole checkpoint from this process. After a WorldError it does not exist."""
        saving = self.begin(step)
        try:
            return saving.commit([saving.write(items)], about)
        except BaseException:
            saving.abandon()
            raise

    def _base(self) -> tuple[int | None, Known]:
        """Find the newest readable checkpoint, and its contents."""
        for step in reversed(self.steps()):
            try:
                return step, self._held_chunks(step)
            except WorldError as error:
                self._complain(step, error)
        return None, Known()

    def _held_chunks(self, step: int) -> Known:
        """Return the chunks that a checkpoint holds. Missing; Damaged."""
        manifest, suspects = self.manifest(step), set(self.storage.names(SUSPECT))
        packs = [p for p in manifest.packs if suspect_name(p) not in suspects]
        for what, known in self._known:  # as it is now, whatever other threads put there
            if what == (manifest.token, packs):
                return known
        known = Known()
        sizes = {pack: size for pack in packs if (size := self.storage.size(pack)) is not None}
        known.learn(manifest, sizes)
        self._known = [((manifest.token, packs), known)]
        return known

    # ------------------------------------------------------------ removing

    def _retire(self, policy: Retention | None) -> tuple[tuple[int, ...], SaveOrder | None]:
        """Remove the manifests that the policy does not keep.

        Returns their steps, and the place of the newest checkpoint in the order.
        """
        saved = []
        for step in self.steps():
            try:
                found = self.manifest(step)
            except WorldError as error:
                self._complain(step, error)
                continue
            saved.append(Saved(order=found.order, age_s=time.time() - found.time))
        kept = choose_kept(saved, policy) if policy is not None else [each.step for each in saved]
        retired = tuple(each.step for each in saved if each.step not in kept)
        for step in retired:
            self.storage.delete(manifest_name(step))
        return retired, max((each.order for each in saved), default=None)

    def withdraw(self, after: int, view: int) -> tuple[int, ...]:
        """Remove the checkpoints of steps beyond `after` that were made in views up to `view`.

        Those being saved at the moment never become checkpoints either. Returns the steps removed.
        """
        self.storage.put(invalidation_name(after, view), [b"invalidation"])
        removed = []
        for step in self.steps():
            try:
                about = self.manifest(step).about
            except WorldError:
                continue  # it cannot be begun from anyway
            if is_withdrawn(invalidation_name(after, view), step, about):
                self.storage.delete(manifest_name(step))
                removed.append(step)
        return tuple(removed)

    def collect(self, policy: Retention | None = None) -> Collected:
        """Retire checkpoints that the policy does not keep, then remove unused packs."""
        unfinished = [(each, each.unfinished()) for each in self._folders()]
        steps, newest = self._retire(policy)
        # In this order: whoever wrote a pack is still saving, or has committed by then.
        packs = [*self._find_remains(PACKS), *self._find_remains(PARTS)]
        intents = self._intents(newest)
        tokens = {intent.token for intent in intents}
        used = {pack for intent in intents for pack in intent.packs}
        for step in self.steps():
            try:
                used.update(self.manifest(step).packs)
            except Missing:
                # Another process has retired it.
                continue
            except Damaged as error:
                self._complain(step, error)
                return Collected(steps=steps, packs=0, freed_bytes=0)
        suspects = set(self.storage.names(SUSPECT))
        for folder, files in unfinished:
            folder.sweep(files, tokens)
        freed = count = 0
        for pack in packs:
            if pack not in used and token_of(pack) not in tokens:
                freed, count = freed + (self.storage.size(pack) or 0), count + 1
                self.storage.delete(pack)
                if suspect_name(pack) in suspects:
                    self.storage.delete(suspect_name(pack))
        return Collected(steps=steps, packs=count, freed_bytes=freed)

    def _complain(self, step: int, error: WorldError) -> None:
        """Report a checkpoint that cannot be read, once, and what follows for later ones."""
        if step not in self._told:
            self._told.add(step)
            self._say(
                f"the checkpoint of step {step} is not built upon, and while it is there nothing "
                f"is removed: {error}"
            )

    def _find_remains(self, prefix: str) -> list[str]:
        """List the names of all objects, also of unfinished ones that a crash left on volumes."""
        storage = self.storage
        if isinstance(storage, VolumeStorage):
            return storage.all_names(prefix)
        return storage.names(prefix)

    def _folders(self) -> list[FileStorage]:
        """Return the folders that the storage consists of; none for a bucket."""
        storage = self.storage
        parts = storage.volumes if isinstance(storage, VolumeStorage) else (storage,)
        return [each for each in parts if isinstance(each, FileStorage)]

    def _intents(self, newest: SaveOrder | None) -> list[Intent]:
        """Return the saves under way, and remove the announcements of saves that have ended.

        Of a writer on another machine it is never known whether it has. Its save is given up once a
        newer checkpoint is there. That is safe if it is still under way, too: it looks for its
        announcement after it has put its manifest.
        """
        found = []
        for name in self.storage.names(SAVING):
            try:
                intent = decode_intent(read_all(self.storage, name, INTENT_BYTES_MAX), name)
            except Missing:
                continue
            except Damaged as error:
                self._say(f"nothing that it may protect is removed: {error}")
                raise
            overtaken = newest is not None and intent.order.is_before(newest)
            at_home = intent.host == name_scope()
            if has_ended(at_home, intent.pid) or (overtaken and not at_home):
                self.storage.delete(name)
            else:
                found.append(intent)
        return found


class Pacer:
    """Limits the rate of reading: it waits until no more than `rate` bytes a second were read."""

    def __init__(self, rate: float, wait: Callable[[float], object] = time.sleep) -> None:
        self._rate = rate
        self._wait = wait
        self._began = time.monotonic()
        self._bytes = 0

    def __call__(self, count: int) -> None:
        self._bytes += count
        early_s = self._began + self._bytes / self._rate - time.monotonic()
        if early_s > 0:
            self._wait(early_s)


def scrub(store: Checkpoints, pacer: Callable[[int], None]) -> Iterator[str]:
    """Read all objects once; yield the faults, and whether they were repaired."""
    if isinstance(store.storage, VolumeStorage):
        yield from _mend(store, store.storage, pacer)
        return
    for step in store.steps():
        try:
            found = [f"step {step}: {bad}" for bad in store.verify(step, pacer)]
        except WorldError as error:
            found = [str(error)]
        # Otherwise it was retired during the scrub.
        if step in store.steps():
            yield from found


def _mend(
    store: Checkpoints, volumes: VolumeStorage, pacer: Callable[[int], None]
) -> Iterator[str]:
    for name in volumes.all_names():
        try:
            yield from (f"repaired: {line}" for line in volumes.repair(name))
            pacer(volumes.size(name) or 0)
        except Missing:
            # It was retired during the repair, or its save was interrupted.
            continue
        except WorldError as error:
            if name in volumes.names(name.rpartition("/")[0] + "/"):  # else it was removed
                if name.startswith(PACKS) and isinstance(error, Damaged):
                    store.suspect(name, str(error))
                yield f"lost: {error}"
