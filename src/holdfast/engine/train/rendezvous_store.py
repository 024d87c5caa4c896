"""Opens and finds the key-value store of torch.distributed that lets a group's processes meet.

By itself torch would listen on all addresses of the machine, to anybody. The store asks nobody for
a proof, so it listens only where it was told to.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from holdfast.engine.net.peer_listener import open_listener

MEET_S = 300.0  # for all processes of a group to come


def open_store(host: str) -> TCPStore:
    """Serve an empty store at a free port of `host`, an address of this machine. OSError."""
    listener, _ = open_listener(host)
    address, port = listener.getsockname()[:2]  # a name could have other addresses as well
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def find_store(host: str, port: int) -> TCPStore:
    """Connect to a store that another process has opened."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=MEET_S))
