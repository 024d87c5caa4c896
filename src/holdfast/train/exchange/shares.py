"""Spreads shares of a large whole, of which each member has one, so that all have all of them.

In each of log2 N turns a member sends all shares that it has to one other member, which doubles
the number of shares that it has. So each share reaches each member once, and none exchanges with
more than 2 log2 N others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.train.exchange.seam import Message, Transport

Share = Sequence[torch.Tensor]


def spread_shares(
    transport: Transport, ranks: Sequence[int], me: int, shares: Sequence[Share], tag: int
) -> None:
    """Send the own share to all of these ranks, and receive theirs. Blocks; raises Aborted.

    `ranks`: the members that take part, in the same order on all. `me`: the own one. `shares`: for
    each of `ranks` the tensors of its share, of the same sizes on all members.
    """
    count = len(ranks)
    place = ranks.index(me)
    held = 1
    while held < count:
        more = min(held, count - held)
        give_to, get_from = ranks[(place - held) % count], ranks[(place + held) % count]
        sends = _messages(give_to, [shares[(place + i) % count] for i in range(more)])
        come = [shares[(place + i) % count] for i in range(held, held + more)]
        transport.exchange(sends, _messages(get_from, come), tag).wait()
        held += more


def _messages(peer: int, shares: Sequence[Share]) -> list[Message]:
    return [(peer, tensor) for share in shares for tensor in share if tensor.numel()]
