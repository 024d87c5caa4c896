"""Drains the node of a pod before the pod ends: Kubernetes runs this hook first.

    python -m holdfast.clusters.kubernetes.kubernetes_leave JOIN SECONDS JOB [CERTIFICATES]

It works without the controller; the secret and the node's name are in the environment. It returns
once the node is not needed any more, or no coordinator answers: then SIGTERM asks the agent itself.
A coordinator of another job than JOB, which may have the same secret, gets no request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.clusters.kubernetes.kubernetes_manifests import POD_VARIABLE
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.types import AgentId
from holdfast.engine.net.secret import load_secret
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import Contact, contact_by, exchange
from holdfast.engine.runtime.job_status import parse_status
from holdfast.engine.wire.messages import DrainRequest, OrderReply, StatusReply, StatusRequest

LOOK_S = 0.5


async def leave(contact: Contact, secret: bytes, node: AgentId, within_s: float) -> None:
    """Order that a node is drained, and wait until it is."""
    until = time.monotonic() + within_s
    order = DrainRequest(agent=node, reason="its pod is being deleted", deadline_s=within_s)
    reply = await exchange(contact, secret, order, OrderReply)
    while reply is not None and not reply.problem and time.monotonic() < until:
        answer = await exchange(contact, secret, StatusRequest(), StatusReply)
        found = parse_status(answer.text).node(node) if answer is not None else None
        if found is None or not (found.members or found.needed):
            return
        await asyncio.sleep(LOOK_S)


def main(argv: Sequence[str]) -> int:
    try:
        secret, node = load_secret(os.environ), AgentId(os.environ[POD_VARIABLE])
        tls = client_of(Path(argv[3]) if argv[3:] else None)
        contact = contact_by(argv[0], tls, job=argv[2])
        asyncio.run(leave(contact, secret, node, float(argv[1])))
    except (HoldfastError, OSError, asyncio.TimeoutError) as error:
        print_line(f"{node} cannot be drained ({error})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
