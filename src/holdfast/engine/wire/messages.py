"""Messages <-> bytes: one kind byte and a MessagePack map, decoded against the exact type.

No object is ever made of a kind that the receiver did not name: `decode` takes the accepted kinds.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.engine.core.directives import AgentReport, Directive, Move, WorkerDirective
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import WireError
from holdfast.engine.core.job_problems import find_problem
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.core.types import AgentId, Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.wire.strict import StrictDecoder

VIEW_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Gives the address of one process of a view for its peers' transports (opaque to all else)."""

    view: int
    peer: Peer
    address: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressBook:
    """Lists the addresses of all processes of a view, once the last has come."""

    view: int
    addresses: tuple[tuple[Peer, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """Asks how the job stands, for an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """Answers with JSON text, ready to print."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Asks what the job is, for a node. `name`: of its agent, if it was given one."""

    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    """Answers with the job, and the address by which the asker is seen from here.

    `incarnation`: of the next agent of that name; every agent known here has a smaller one.
    """

    spec: JobSpec
    seen_as: str
    incarnation: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Orders that the job end, for an operator."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """Orders that a node be left, for an operator; the coordinator passes it on to the node."""

    agent: AgentId
    reason: str
    #: The time until the node is gone.
    deadline_s: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Orders that the rows of tables be on this number of servers, for an operator."""

    servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequest:
    """Orders that a worker of a node be moved to another, for an operator; passed on likewise."""

    agent: AgentId
    leaving: Move


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRequest:
    """Gives a node's failure domains, for its cluster manager; passed on likewise."""

    agent: AgentId
    domains: Domains


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAwaited:
    """Reports which nodes the cluster manager does not give yet, and why; empty: it gives all."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksRequest:
    """Asks that workers write where their threads are; the coordinator and agents pass it on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRequest:
    """Asks for the coordinator's time. `asked`: the agent's own, in seconds since the epoch."""

    asked: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReply:
    """Answers a ClockRequest with the time of the coordinator's clock."""

    asked: float
    told: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReply:
    """Answers whether an order was taken or passed on: empty, or the reason.

    `warning`: a possible loss.
    """

    problem: str
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    """Asks for a measurement between two machines (`holdfast doctor --peer`), not in a job."""

    number: int
    #: "up" or "down": the direction of a stream of plain bytes, for which a port is opened.
    stream: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReply:
    """Answers a PeerRequest, with the times of the server's clock at which it came and went."""

    number: int
    received_s: float
    answered_s: float
    #: The port that awaits one connection, which begins with the token.
    stream_port: int = 0
    stream_token: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRequest:
    """Asks for the new parts of files of the run, for a viewer on another machine.

    `held`: the viewer's position in each file, from the parts that it has received.
    """

    held: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Carries a file's new content, to be appended; `replaces`: to take the place of the old one.

    `held` is to be sent back in the next request.
    """

    name: str
    data: bytes
    held: int
    replaces: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesReply:
    """Answers a FilesRequest. `more`: there is more than fits into one reply."""

    parts: tuple[FilePart, ...]
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Asks for the end of a worker's newest log. `number`: repeated in the reply."""

    worker: WorkerId
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReply:
    """Answers a LogRequest with a file's name and last lines; an empty name: there is none."""

    number: int
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedDirective:
    """Carries a Directive with its view, which is encoded once for all agents."""

    directive: Directive
    view: bytes  # compressed


KINDS: dict[int, type] = {
    1: WorkerStatus,
    2: WorkerDirective,
    3: AgentReport,
    4: Directive,
    5: Address,
    6: AddressBook,
    7: StatusRequest,
    8: StatusReply,
    9: StopRequest,
    10: JoinRequest,
    11: JoinReply,
    12: ViewedDirective,
    13: DrainRequest,
    14: OrderReply,
    15: MoveRequest,
    16: LabelRequest,
    17: StacksRequest,
    18: ClockRequest,
    19: ClockReply,
    20: PeerRequest,
    21: PeerReply,
    22: FilesRequest,
    23: FilesReply,
    24: LogRequest,
    25: LogReply,
    26: ScaleRequest,
    27: NodesAwaited,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[int, StrictDecoder[Any]] = {kind: StrictDecoder(cls) for kind, cls in KINDS.items()}
_VIEW_DECODER = StrictDecoder(View)
_PACKED: list[tuple[View, bytes]] = []  # none or one


def encode(message: object) -> bytes:
    if isinstance(message, Directive) and message.view is not None:
        plain = dataclasses.replace(message, view=None)
        message = ViewedDirective(directive=plain, view=_pack(message.view))
    return bytes([_KIND_OF[type(message)]]) + _ENCODER.encode(message)


def decode(payload: bytes, *accepted: type) -> Any:
    """Decode a message, which is of one of the `accepted` types. WireError with its fault."""
    kind = KINDS.get(payload[0]) if payload else None
    if kind is None or (Directive if kind is ViewedDirective else kind) not in accepted:
        names = ", ".join(cls.__name__ for cls in accepted)
        raise WireError(f"a message of kind {payload[:1]!r} came where {names} was expected")
    try:
        message = _DECODERS[payload[0]].decode(payload[1:])
        if isinstance(message, ViewedDirective):
            return dataclasses.replace(message.directive, view=_unpack(message.view))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a {kind.__name__} is malformed: {error}") from None
    if isinstance(message, JoinReply) and (problem := find_problem(message.spec)):
        raise WireError(f"a JoinReply is malformed: {problem}")
    return message


def _pack(view: View) -> bytes:
    """Encode a view, and remember the last: a large job's view goes to a thousand agents."""
    if not _PACKED or _PACKED[0][0] is not view:
        _PACKED[:] = [(view, zlib.compress(_ENCODER.encode(view), 1))]
    return _PACKED[0][1]


def _unpack(data: bytes) -> View:
    body = zlib.decompressobj()
    plain = body.decompress(data, VIEW_BYTES_MAX)
    if not body.eof or body.unused_data:
        raise zlib.error("a view that does not end, or is too large")
    return _VIEW_DECODER.decode(plain)
