"""Runs a server of tables: a process that holds rows for the workers of a job.

    python -m holdfast.runtime.node.row_server

Its environment names the host to listen on, the job's peer key, and a descriptor to which it writes
its address once it listens. It is killed when its agent goes.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from holdfast.health.measure.ending_signals import leave_ending_signals
from holdfast.health.measure.lifetime import die_with_parent
from holdfast.net.descriptors import raise_limit
from holdfast.net.peer_identity import PeerIdentity
from holdfast.net.peer_stream import SendRate
from holdfast.net.standard_streams import print_plain
from holdfast.runtime.node import bootstrap
from holdfast.runtime.rundir import RunDir
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.open import open_storage

MODULE = "holdfast.runtime.node.row_server"
ADDRESS_FD = "HOLDFAST_ADDRESS_FD"


def main(argv: list[str]) -> int:
    """Serve until the agent ends this process."""
    die_with_parent(int(os.environ["HOLDFAST_PARENT"]))
    leave_ending_signals()
    raise_limit()
    key = bytes.fromhex(os.environ.pop("HOLDFAST_PEER_KEY"))
    tls = os.environ.get("HOLDFAST_TLS", "")
    identity = PeerIdentity.of(key, Path(tls) if tls else None)

    from holdfast.servers.serving import RowServer  # takes seconds
    from holdfast.servers.table_store import TableStore

    spec = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"])).spec()
    where, rate = spec.checkpoints.store, SendRate(spec.servers.copy_rate * 1e6)
    store = TableStore(Checkpoints(open_storage(where, _say), _say)) if where else None
    address = RowServer(identity, _say, store, rate).listen(os.environ["HOLDFAST_HOST"])
    descriptor = int(os.environ[ADDRESS_FD])
    os.write(descriptor, address.encode() + b"\n")
    os.close(descriptor)
    threading.Event().wait()
    return 0


def _say(text: str) -> None:
    print_plain(f"holdfast: {text}", file=sys.stderr)
    sys.stderr.flush()


if __name__ == "__main__":
    bootstrap.leave(main(sys.argv[1:]))
