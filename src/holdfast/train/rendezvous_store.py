"""Opens the key-value store of torch.distributed for a group of processes."""

from __future__ import annotations

from torch.distributed import TCPStore


def open_store() -> tuple[list[object], int]:
    """Serve an empty store on all addresses of this machine; return its keeper and its port."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return [store], store.port
