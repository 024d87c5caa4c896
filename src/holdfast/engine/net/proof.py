"""Makes the tokens that prove to a process that another one belongs to the same job.

Only a holder of the job's peer key can make a token. It is bound to its sender, its receiver and
all earlier words of both sides, which contain a fresh random number of each and so belong to one
connection alone. A token that was overheard is of no use in another group or to another member.

This proves the members' identity as the group is built. It neither hides nor seals later data.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

TOKEN_BYTES = 32
NONCE_BYTES = 16


def group_name(addresses: Sequence[bytes]) -> bytes:
    """Digest a group's `addresses` by rank, each with its owner's nonce: no other group has it."""
    digest = hashlib.sha256(b"holdfast group 1")
    for address in addresses:
        digest.update(len(address).to_bytes(4, "big") + address)
    return digest.digest()


def token(key: bytes, group: bytes, sender: int, receiver: int) -> bytes:
    """Make what rank `sender` shows to rank `receiver`."""
    text = b"holdfast peer 1|%s|%d|%d" % (group, sender, receiver)
    return hmac.digest(key, text, hashlib.sha256)


def is_token(claim: bytes, key: bytes, group: bytes, sender: int, receiver: int) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(claim, token(key, group, sender, receiver))
