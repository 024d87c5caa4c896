"""Runs one process of a hosted service, such as a server of tables.

    python -m holdfast.engine.runtime.node.service_process

Its environment names the host to listen on, the job's peer key, and a descriptor to which it writes
its address once it listens. It is killed when its agent goes.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from holdfast.engine.host.lifetime import die_with_parent, leave_ending_signals
from holdfast.engine.net.descriptors import raise_limit
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.plugins import find_service
from holdfast.engine.runtime.node import bootstrap
from holdfast.engine.runtime.rundir import RunDir

MODULE = "holdfast.engine.runtime.node.service_process"
ADDRESS_FD = "HOLDFAST_ADDRESS_FD"


def main(argv: list[str]) -> int:
    """Serve until the agent ends this process."""
    die_with_parent(int(os.environ["HOLDFAST_PARENT"]))
    leave_ending_signals()
    raise_limit()
    key = bytes.fromhex(os.environ.pop("HOLDFAST_PEER_KEY"))
    tls = os.environ.get("HOLDFAST_TLS", "")
    identity = PeerIdentity.of(key, Path(tls) if tls else None)

    spec = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"])).spec()
    # Its modules take seconds to import.
    service = find_service(spec.servers.service)
    address = service.listen(spec, identity, os.environ["HOLDFAST_HOST"], print_line)
    descriptor = int(os.environ[ADDRESS_FD])
    os.write(descriptor, address.encode() + b"\n")
    os.close(descriptor)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    bootstrap.leave(main(sys.argv[1:]))
