"""Lets each member of a view update only the parameters that it owns (ZeRO-1).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020: each
member keeps the optimizers' state of its share of the parameters, updates these, and sends them to
all other members. Parameters are owned whole, so that an optimizer computes for each the same bits
as if it had all of them. A member that cannot finish an exchange must end: the state of the lost
members is gone, and all start again from the nodes' memory.

Where the whole state is captured, no member needs all of it: each names the bytes that it has to
keep or to save, and receives the other members' share of them, with a digest. All members capture
it at the same boundary.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import Aborted, Damaged, UserError
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.state import Extent, Meta, NamedTensor, Wanted
from holdfast.engine.train.exchange.layout import (
    TAG_UPDATE,
    Layout,
    find_branches,
    gather_bytes,
    spread_shares,
)
from holdfast.engine.train.exchange.seam import AloneTransport, Message, Transport
from holdfast.engine.train.exchange.tensor_bytes import DIGEST_WORDS, digest_of

ON_SERVERS = "is_on_servers"  # an attribute of optimizers whose rows servers hold and update
DIGEST_BYTES = 16
WHOLE, DAMAGED = b"\1", b"\0"  # whether a member has received all messages undamaged
Tree = dict[str, Any]  # the states of protected objects, by their names


class ShardedOptimizers:
    """Shares out the state of the optimizers among `protected`.

    `wait_for_end` waits until this process is ended. It is called by the script's thread, as
    everything here but `enter`.
    """

    def __init__(self, protected: Mapping[str, Any], wait_for_end: Callable[[], None]) -> None:
        self._protected = protected
        self._optimizers = {name: o for name, o in protected.items() if _is_shared_out(o)}
        self._wait_for_end = wait_for_end
        self.layout: Layout | None = None  # the view's layout; None before the first view
        self.transport: Transport = AloneTransport()
        self._owners: dict[int, int] = {}  # owners' ranks, by the parameter's identity
        self._loads: list[int] = []  # elements, by rank
        # parameters updated in the present step of an optimizer
        self._updated: list[torch.Tensor] = []
        # other members' parameters, with their gradients
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def enter(self, layout: Layout, transport: Transport) -> None:
        """Share the parameters out for a new view, and drop states that other members own."""
        self.layout, self.transport = layout, transport
        self._owners, self._loads = {}, [0] * layout.size
        self._assign(p for each in self._optimizers.values() for p in _parameters(each))
        for optimizer in self._optimizers.values():
            for p in [p for p in optimizer.state if not self._is_mine(p)]:
                del optimizer.state[p]

    # ------------------------------------------------------------ updates

    def hide_others(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Hide other members' parameters from an optimizer. Raises UserError."""
        if self.layout is None or not _is_shared_out(optimizer):
            return
        if closure:
            raise UserError(
                f"{type(optimizer).__name__}.step(closure) with --shard-optimizer: an optimizer "
                "that computes losses itself needs all of its state; leave the option out"
            )
        self._assign(_parameters(optimizer))
        self._updated = [p for p in _parameters(optimizer) if p.grad is not None]
        self._hidden = [(p, p.grad) for p in self._updated if not self._is_mine(p)]
        for p, _ in self._hidden:
            p.grad = None

    def exchange_parameters(self) -> None:
        """Exchange updated parameters with all other members."""
        for p, grad in self._hidden:
            p.grad = grad
        updated, self._updated, self._hidden = self._updated, [], []
        layout = self.layout
        if layout is None or layout.size == 1 or not updated:
            return
        shares: list[list[torch.Tensor]] = [[] for _ in range(layout.size)]
        scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p in updated:
            if not p.numel():
                continue
            held, owner = p.detach(), self._owners[id(p)]
            compact = held.contiguous()
            shares[owner].append(compact.reshape(-1).view(torch.uint8))
            if owner != layout.rank and not held.is_contiguous():
                scattered.append((held, compact))
        try:
            spread_shares(self.transport, range(layout.size), layout.rank, shares, TAG_UPDATE)
        except Aborted:
            self._wait_for_end()
        for held, compact in scattered:
            held.copy_(compact)

    def meet(self, leader: int) -> None:
        """Wait, if this is the leader (by rank), at a loop's end until all have all parameters.

        Once the leader is past the loop the other members may end, and missing parameters would be
        lost.
        """
        layout = self.layout
        if layout is None or layout.size == 1:
            return
        awaits, follows = find_branches(layout.rank, leader, layout.size)
        word = torch.zeros(1, dtype=torch.int64)
        try:
            receives = [(peer, word.clone()) for peer in follows]
            self.transport.exchange([], receives, TAG_UPDATE).wait()
            if awaits is not None:
                self.transport.exchange([(awaits, word)], [], TAG_UPDATE).wait()
        except Aborted:
            if layout.rank == leader:  # otherwise the leader does not end the loop
                self._wait_for_end()

    def exchange(self, sends: list[Message], receives: list[Message]) -> None:
        """Exchange messages with other members; does not return if the view is given up."""
        try:
            self.transport.exchange(sends, receives, TAG_UPDATE).wait()
        except Aborted:
            self._wait_for_end()

    def hear_all(self, text: bytes) -> list[bytes]:
        """Return each member's message, by rank; does not return if the view is given up.

        Damaged, on all members, if a message to one of them has arrived damaged.
        """
        said = self._gather(xxhash.xxh3_128_digest(text) + text)
        texts = [each[DIGEST_BYTES:] for each in said]
        whole = all(
            xxhash.xxh3_128_digest(text) == each[:DIGEST_BYTES]
            for text, each in zip(texts, said, strict=True)
        )
        if any(each != WHOLE for each in self._gather(WHOLE if whole else DAMAGED)):
            raise Damaged("what another worker says of its state arrived damaged")
        return texts

    def _gather(self, text: bytes) -> list[bytes]:
        assert self.layout is not None, "nobody can be heard outside of a view"
        try:
            return gather_bytes(self.transport, self.layout, text)
        except Aborted:
            self._wait_for_end()
            raise

    # ------------------------------------------------------------ states

    def common(self) -> Tree:
        """Return the part of the state that is the same on all members."""
        found: Tree = {}
        for name, each in self._protected.items():
            found[name] = each.state_dict()
            if name in self._optimizers:
                places = range(len(_parameters(self._optimizers[name])))
                kept = {k: v for k, v in found[name]["state"].items() if k not in places}
                found[name] = {**found[name], "state": kept}
        return found

    def own_part(self) -> dict[str, dict[int, Any]]:
        """Return this member's part of each optimizer's state, by the parameter's place."""
        found: dict[str, dict[int, Any]] = {}
        for name, optimizer in self._optimizers.items():
            places = range(len(_parameters(optimizer)))
            held = optimizer.state_dict()["state"]
            found[name] = {place: held[place] for place in places if place in held}
        return found

    def drop_others(self, states: Mapping[str, Any]) -> Tree:
        """Drop the states that other members own from states that will be loaded.

        This member's own states stay unchanged where the given ones lack them.
        """
        found = dict(states)
        for name, mine in self.own_part().items():
            if name not in found:
                continue
            owned = [self._is_mine(p) for p in _parameters(self._optimizers[name])]
            given = found[name]["state"]
            others = [place for place, is_mine in enumerate(owned) if not is_mine]
            kept = {place: each for place, each in given.items() if place not in others}
            found[name] = {**found[name], "state": {**mine, **kept}}
        return found

    # ------------------------------------------------------------ owners

    def _is_mine(self, p: torch.Tensor) -> bool:
        layout = self.layout
        return layout is None or self._owners.get(id(p), layout.rank) == layout.rank

    def _assign(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give each parameter without an owner to the member with the fewest elements."""
        new = {id(p): p.numel() for p in parameters if id(p) not in self._owners}
        owners = share_out(list(new.values()), self._loads)
        self._owners |= dict(zip(new, owners, strict=True))


def _is_shared_out(protected: Any) -> bool:
    """Return whether this is an optimizer that updates parameters in this process."""
    is_optimizer = isinstance(protected, torch.optim.Optimizer)
    return is_optimizer and not getattr(protected, ON_SERVERS, False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return its parameters, in the order in which its state_dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


ALIGNED = 64  # bytes


class GatheredState:
    """Captures the state that `sharding` has shared out."""

    def __init__(self, sharding: ShardedOptimizers) -> None:
        self._sharding = sharding

    def capture(self, wanted: Wanted) -> tuple[bytes, list[NamedTensor]]:
        """Return the skeleton of the whole state, and tensors in which the wanted bytes are valid.

        Their other bytes are undefined. Damaged: a message did not arrive as it was sent.
        """
        layout = self._sharding.layout
        assert layout is not None, "the state is captured in a view only"
        whole, holders = self._merge(layout)
        skeleton, found = state.flatten_named(whole)
        holder = [holders.get(each.tensor.data_ptr()) for each in found]
        tensors = [each.tensor for each in found]
        wants = [wanted(skeleton, tensors, rank) for rank in range(layout.size)]
        mine = wants[layout.rank]
        for index, each in enumerate(found):
            here = holder[index] in (None, layout.rank)
            if each.tensor.is_cuda:
                kept = [extent for extent in mine if extent.tensor == index and here]
                found[index] = replace(each, tensor=_on_host(each.tensor, kept), private=True)
            elif not here:
                found[index] = replace(each, private=True)
        self._exchange(layout, tensors, holder, wants)
        return skeleton, found

    def _merge(self, layout: Layout) -> tuple[Tree, dict[int, int]]:
        """Merge all members' states into one, with empty rooms for tensors that are elsewhere.

        Returns the whole state, and the rank that holds each tensor, by the tensor's address.
        """
        own = self._sharding.own_part()
        skeleton, tensors = state.flatten(own, "state")
        entries: dict[str, dict[int, object]] = {name: dict(held) for name, held in own.items()}
        holders = {each.data_ptr(): layout.rank for each in tensors if each.numel()}
        for rank, text in enumerate(self._sharding.hear_all(skeleton)):
            if rank == layout.rank:
                continue
            rooms = _rooms(state.metas(text))
            holders |= {each.data_ptr(): rank for each in rooms if each.numel()}
            for name, held in state.restore(text, rooms).items():
                entries[name] |= held
        whole = self._sharding.common()
        for name, held in entries.items():
            held = {place: held[place] for place in sorted(held)}
            whole[name] = {**whole[name], "state": {**held, **whole[name]["state"]}}
        return whole, holders

    def _exchange(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        holder: Sequence[int | None],
        wants: Sequence[Sequence[Extent]],
    ) -> None:
        sends: list[Message] = []
        for rank in layout.others:
            for extent in wants[rank]:
                if holder[extent.tensor] == layout.rank and extent.start < extent.stop:
                    data = _bytes(tensors[extent.tensor], extent).cpu()
                    sends += [(rank, data), (rank, digest_of(data))]
        receives: list[Message] = []
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for extent in wants[layout.rank]:
            source = holder[extent.tensor]
            if source not in (None, layout.rank) and extent.start < extent.stop:
                data, digest = _bytes(tensors[extent.tensor], extent), _room_for_digest()
                receives += [(source, data), (source, digest)]
                arriving.append((data, digest))
        self._sharding.exchange(sends, receives)
        if not all(torch.equal(digest_of(data), digest) for data, digest in arriving):
            raise Damaged("what another worker holds of the state arrived damaged")


def _rooms(metas: Sequence[Meta]) -> list[torch.Tensor]:
    """Make room for tensors in a mapping of its own.

    Untouched pages take no memory, and all of it goes back to the system with the last tensor; an
    allocator might keep it.
    """
    blanks = [state.allocate(meta, "meta") for meta in metas]
    sizes = [-(-blank.nbytes // ALIGNED) * ALIGNED for blank in blanks]
    mapping = mmap.mmap(-1, max(sum(sizes), 1))
    starts = itertools.accumulate(sizes, initial=0)
    return [
        torch.frombuffer(mapping, dtype=blank.dtype, count=blank.numel(), offset=start).view(
            blank.shape
        )
        if blank.numel()
        else torch.empty_like(blank, device="cpu")
        for blank, start in zip(blanks, starts, strict=False)
    ]


def _bytes(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat[extent.start : extent.stop]


def _on_host(tensor: torch.Tensor, extents: Sequence[Extent]) -> torch.Tensor:
    """Return room for a tensor, with these bytes of it."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype)
    for extent in extents:
        _bytes(room, extent).copy_(_bytes(tensor, extent))
    return room


def _room_for_digest() -> torch.Tensor:
    return torch.zeros(DIGEST_WORDS, dtype=torch.int64)


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Give each of several items to the receiver with the least, the largest items first.

    `loads`: each receiver's load, to which items are added. Returns the receiver of each item.
    """
    found = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found[item] = loads.index(min(loads))
        loads[found[item]] += sizes[item]
    return found
