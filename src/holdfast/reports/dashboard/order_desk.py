"""Takes an operator's orders from the page in two steps: a question, and its confirmation.

The answer to an order is a question with a random word that is good for one use; only with that
word the order is given. `holdfast drain` and `holdfast migrate` use the same code.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.runtime import contact
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.rundir import RunDir

CONFIRM_S = 120.0
WAITING_MAX = 16  # questions, and orders that are not done
SHOWN_MAX = 20  # orders
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Reason = Annotated[str, msgspec.Meta(max_length=200)]


class DrainOrder(msgspec.Struct, tag="drain", tag_field="order", forbid_unknown_fields=True):
    """Asks that a node leaves the job."""

    node: _Name
    reason: _Reason = ""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class MigrateOrder(msgspec.Struct, tag="migrate", tag_field="order", forbid_unknown_fields=True):
    """Asks that a worker moves to another node."""

    worker: Annotated[int, msgspec.Meta(ge=0)]
    to: _Name
    reason: _Reason = ""


class Confirmation(msgspec.Struct, forbid_unknown_fields=True):
    """Confirms the order of a question."""

    confirm: Annotated[str, msgspec.Meta(max_length=100)]


Order = DrainOrder | MigrateOrder
_decode_order = msgspec.json.Decoder(Order).decode
_decode_confirmation = msgspec.json.Decoder(Confirmation).decode


class OrderDesk:
    """Gives orders in threads, and tells how each of them goes. Safe for several threads."""

    def __init__(
        self,
        run_dir: RunDir,
        tls: ssl.SSLContext | None,
        tell: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        """Open the desk. `tell`: takes all shown orders whenever one of them changes."""
        self._run_dir = run_dir
        self._tls = tls
        self._tell = tell
        self._lock = threading.Lock()
        self._asked: dict[str, tuple[float, Order]] = {}  # by word: when it expires
        self._shown: list[dict[str, Any]] = []
        self._given = 0

    def ask(self, body: bytes) -> dict[str, str]:
        """Return the question that an order needs to be confirmed by. UserError."""
        order = self._parse(_decode_order, body)
        question = self._question_of(order)
        word = secrets.token_urlsafe(24)
        with self._lock:
            now = time.monotonic()
            self._asked = {w: kept for w, kept in self._asked.items() if kept[0] > now}
            while len(self._asked) >= WAITING_MAX:
                del self._asked[next(iter(self._asked))]
            self._asked[word] = now + CONFIRM_S, order
        return {"question": question, "confirm": word}

    def confirm(self, body: bytes) -> dict[str, int]:
        """Give the order of a question, and return its number. UserError."""
        word = self._parse(_decode_confirmation, body).confirm
        with self._lock:
            expires, order = self._asked.pop(word, (0.0, None))
            if order is None or expires <= time.monotonic():
                raise UserError("no order waits for this confirmation: give the order again")
            if sum(each["state"] == "waiting" for each in self._shown) >= WAITING_MAX:
                raise UserError(f"{WAITING_MAX} orders are not done yet: wait for one of them")
            self._given += 1
            number = self._given
            text, at = _name_of(order), time.time()
            self._shown.append(
                {"id": number, "text": text, "at": at, "state": "waiting", "answer": ""}
            )
            self._shown = self._shown[-SHOWN_MAX:]
        self._show()
        threading.Thread(target=self._carry_out, args=(number, order), daemon=True).start()
        return {"id": number}

    def _parse(self, decode: Callable[[bytes], Any], body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UserError(f"the order cannot be read: {error}") from None

    def _question_of(self, order: Order) -> str:
        status = job_status(self._run_dir, self._tls)
        if isinstance(order, MigrateOrder):
            contact.make_order(status, order.worker, order.to, order.reason)
            return (
                f"Move worker {order.worker} to node {order.to}? A worker that waits there takes "
                "its place while the job trains."
            )
        node = status.node(order.node)
        if node is None:
            names = ", ".join(each.id for each in status.agents)
            raise UserError(f"there is no node {order.node!r} in the job; its nodes: {names}")
        many = f"{node.members} worker{'' if node.members == 1 else 's'}"
        only = " It is the only node of the job." if len(status.agents) == 1 else ""
        return (
            f"Drain node {node.id} with {many} in the job? They leave at a step boundary, once "
            f"others have the state, and its agent ends.{only}"
        )

    def _carry_out(self, number: int, order: Order) -> None:
        try:
            answer, state = self._give(order), "done"
        except (HoldfastError, OSError) as error:
            answer, state = str(error), "refused"
        with self._lock:
            for each in self._shown:
                if each["id"] == number:
                    each.update(state=state, answer=answer)
        self._show()

    def _give(self, order: Order) -> str:
        run_dir, tls = self._run_dir, self._tls
        if isinstance(order, MigrateOrder):
            reason = order.reason or contact.MOVE_REASON
            contact.migrate(run_dir, tls, order.worker, order.to, reason)
            contact.await_migrated(run_dir, tls, order.worker)
            return contact.describe_migrated(order.worker, order.to)
        reason = order.reason or contact.DRAIN_REASON
        deadline_s = float("inf") if order.deadline_s is None else order.deadline_s
        warnings = contact.drain(run_dir, tls, [order.node], reason, deadline_s)
        contact.await_drained(run_dir, tls, order.node)
        return "; ".join([contact.describe_drained(order.node), *warnings])

    def _show(self) -> None:
        with self._lock:
            shown = [dict(each) for each in self._shown]
        self._tell(shown)


def _name_of(order: Order) -> str:
    if isinstance(order, MigrateOrder):
        return f"migrate worker {order.worker} to {order.to}"
    return f"drain {order.node}"
