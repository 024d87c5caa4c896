"""Names what the members of a view do together, from one step boundary to the next."""

from __future__ import annotations

import enum

from holdfast.engine.core.transitions import Transitions


class Activity(enum.Enum):
    """Names what the members of a view do together, one after the other."""

    CLOSED = "closed"  # no view, or one that was given up
    SYNC = "sync"  # members connect, and are brought to the same state
    AGREE = "agree"  # members tell each other what audits ask
    TASKS = "tasks"  # the step is not open here, or it is not settled who counts
    SUM = "sum"  # buckets are summed as they fill
    ROWS = "rows"  # this member's tasks are done: the rows are exchanged as well
    AUDITING = "auditing"  # this member still computes audited tasks
    AUDIT = "audit"
    CHECK_SUMS = "check sums"
    KEEP = "keep"  # the reduced gradient goes into the node's memory
    VOTE = "vote"
    REDO = "redo"  # the step is computed again once the task under way is done
    CONFESS = "confess"  # a member is wrong; all exchange their records of it


STEPPING = (
    *(Activity.TASKS, Activity.SUM, Activity.ROWS, Activity.AUDITING, Activity.AUDIT),
    *(Activity.CHECK_SUMS, Activity.KEEP, Activity.VOTE, Activity.REDO),
)

SUMMED = (  # the sums of the step are here
    *(Activity.AUDITING, Activity.AUDIT, Activity.CHECK_SUMS, Activity.KEEP, Activity.VOTE),
)

ACTIVITY_MOVES = Transitions(
    {
        Activity.CLOSED: (Activity.SYNC,),
        Activity.SYNC: (Activity.AGREE, Activity.TASKS, Activity.CONFESS),
        Activity.AGREE: (Activity.SYNC,),
        Activity.TASKS: (Activity.SUM,),
        Activity.SUM: (Activity.ROWS,),
        Activity.ROWS: (Activity.AUDITING,),
        Activity.AUDITING: (Activity.AUDIT, Activity.CHECK_SUMS, Activity.CONFESS),
        Activity.AUDIT: (Activity.CHECK_SUMS, Activity.REDO, Activity.CONFESS),
        Activity.CHECK_SUMS: (Activity.KEEP, Activity.VOTE, Activity.CONFESS),
        Activity.KEEP: (Activity.VOTE,),
        Activity.VOTE: (Activity.TASKS, Activity.REDO),
        Activity.REDO: (Activity.TASKS,),
        Activity.CONFESS: (),
    },
    always=Activity.CLOSED,  # a view can be given up at any time
)
