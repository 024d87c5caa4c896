"""Asks Ray, in a process of its own: one question and one answer a line, as JSON.

    python -m holdfast.clusters.ray.ray_driver ADDRESS

Ray's library blocks for as long as it likes, writes where it likes, and ends its process when the
cluster is away for long. Here that does no harm: RayLink, which asks, starts another one.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated import gcs_pb2

from holdfast.clusters.ray.ray_place import RayPlace
from holdfast.clusters.ray.ray_tables import NAMESPACE, NODE_LABEL, RUNNING_STATE, STATES, selector
from holdfast.engine.core.errors import first_line

ASK_S = 10.0
UNIT = ray._raylet.IMPLICIT_RESOURCE_PREFIX


class RayDriver:
    """Carries out questions by Ray's own words; each method is one of them."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._gcs = ray._raylet.GcsClient(address=address)
        self._loop = loop

    def hello(self) -> dict[str, Any]:
        """Return this machine's address in the cluster."""
        return {"host": ray.util.get_node_ip_address(), "version": ray.__version__}

    def tables(self) -> dict[str, Any]:
        """List our actors that wait or run, then the nodes that are up: theirs are among these."""
        actors = self._loop.run_until_complete(self._actors())
        draining = ray._private.state.state.get_draining_nodes()
        nodes = []
        for node in self._gcs.get_all_node_info(timeout=ASK_S).values():
            if node.state == gcs_pb2.GcsNodeInfo.ALIVE:
                id_ = node.node_id.hex()
                found = {"id": id_, "name": node.node_name or node.node_manager_address}
                found["resources"] = dict(node.resources_total)
                found["labels"] = dict(node.labels)
                found |= {"drains": id_ in draining, "drained_at": draining.get(id_, 0) / 1000}
                nodes.append(found)
        waits = any(actor["state"] != RUNNING_STATE for actor in actors)
        return {"actors": actors, "nodes": nodes, "demands": self._demands(nodes) if waits else []}

    def _demands(self, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """List what our actors that wait demand, and add its use to each node."""
        state = get_cluster_resource_state(self._gcs)
        free = {node.node_id.hex(): dict(node.available_resources) for node in state.node_states}
        for node in nodes:
            node["free"] = free.get(node["id"], {})
            node["taken"] = [
                key.removeprefix(UNIT) for key, left in node["free"].items()
                if key.startswith(UNIT) and left < 1
            ]  # fmt: skip
        found = []
        for each in state.pending_resource_requests:
            wanted = dict(each.request.resources_bundle)
            rules = [r for s in each.request.label_selectors for r in s.label_constraints]
            avoid = [id_ for r in rules if r.label_key == NODE_LABEL for id_ in r.label_values]
            for key in [key for key in wanted if key.startswith(UNIT)]:
                del wanted[key]
                found.append({"unit": key.removeprefix(UNIT), "resources": wanted, "avoid": avoid})
        return found

    def start(self, order: Mapping[str, Any]) -> None:
        """Order an actor, unless there is one of that name: one node never gets two of a unit.

        Every node has one of each implicit resource; so Ray itself keeps agents apart, and what
        waits for a node shows an autoscaler that one is wanted.
        """
        unit = f"{UNIT}{order['unit']}"
        place: Any = ray.remote(RayPlace)
        place.options(
            name=order["name"],
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            num_cpus=order["cpus"],
            num_gpus=order["gpus"],
            resources={unit: 1.0},
            label_selector=selector(order["avoid"]),
        ).remote(order["command"], order["environment"], order["output"])

    def end(self, name: str, handle: str) -> None:
        """Kill an actor, if it is still the one of this name."""
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        if actor._actor_id.hex() == handle:
            ray.kill(actor)

    async def _actors(self) -> list[dict[str, str]]:
        found = []
        for state in STATES:
            listed = await self._gcs.async_get_all_actor_info(actor_state_name=state, timeout=ASK_S)
            for actor in listed.values():
                if actor.ray_namespace == NAMESPACE:
                    about = {"id": actor.actor_id.hex(), "name": actor.name, "state": state}
                    found.append(about | {"node": actor.address.node_id.hex()})
        return found


def answer(driver: RayDriver | None, address: str, line: str) -> tuple[RayDriver | None, str]:
    """Answer a line, and connect before if that has not been done; return also the driver.

    The answer has the result, or Ray's error, and whether it is a refusal.
    """
    word, given = json.loads(line)
    try:
        driver = driver or connect(address)
        reply = {"found": getattr(driver, word)(*given)}
    except Exception as error:  # noqa: BLE001  # Ray's errors are of many families
        refused = isinstance(error, (TypeError, ValueError))
        reply = {"problem": first_line(error), "refused": refused}
    return driver, json.dumps(reply)


def connect(address: str) -> RayDriver:
    ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    return RayDriver(ray.get_runtime_context().gcs_address, asyncio.new_event_loop())


def read_lines(lines: queue.SimpleQueue[str]) -> None:
    """Pass questions on; whoever asked may go at any time, while Ray does not answer."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is not an answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    driver = None
    while True:
        driver, reply = answer(driver, argv[0], lines.get())
        answers.write(f"{reply}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
