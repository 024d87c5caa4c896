"""Names the sources of a replica, and the sinks of its copies. Pure."""

from __future__ import annotations

import enum


class SourceKind(enum.Enum):
    """Names where a worker gets a state or a reduced gradient from."""

    STORE = "store"  # a checkpoint
    MEMORY = "memory"  # pieces in the nodes' memory
    MEMBERS = "members"  # steps that members of the view have kept
    FEED = "feed"  # what members send to a worker that follows


class SinkKind(enum.Enum):
    """Names the receivers of a copy of the state, or of a reduced gradient."""

    STORE = "store"
    MEMORY = "memory"
    FOLLOWERS = "followers"  # workers that are fed
    LATE = "late"  # members that were suspended, and come back
