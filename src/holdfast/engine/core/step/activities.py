"""Names what the members of a view do together, from one step boundary to the next."""

from __future__ import annotations

import enum

from holdfast.engine.core.ground.transitions import Transitions


class Activity(enum.Enum):
    """Names what the members of a view do together, one after the other."""

    #: No view, or one that was given up.
    CLOSED = "closed"
    #: Members connect, and are brought to the same state.
    SYNC = "sync"
    #: Members exchange the agreements that audits need.
    AGREE = "agree"
    #: The step is not open here, or it is not settled which members count.
    TASKS = "tasks"
    #: Buckets are summed as they fill.
    SUM = "sum"
    #: This member's tasks are done: the rows are exchanged as well.
    ROWS = "rows"
    #: This member still computes audited tasks.
    AUDITING = "auditing"
    AUDIT = "audit"
    CHECK_SUMS = "check sums"
    #: The reduced gradient goes into the node's memory.
    KEEP = "keep"
    VOTE = "vote"
    #: The step is computed again once the task under way is done.
    REDO = "redo"
    #: Members exchange their records of a fault.
    REPORT_FAULT = "report fault"


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
        Activity.SYNC: (Activity.AGREE, Activity.TASKS, Activity.REPORT_FAULT),
        Activity.AGREE: (Activity.SYNC,),
        Activity.TASKS: (Activity.SUM,),
        Activity.SUM: (Activity.ROWS,),
        Activity.ROWS: (Activity.AUDITING,),
        Activity.AUDITING: (Activity.AUDIT, Activity.CHECK_SUMS, Activity.REPORT_FAULT),
        Activity.AUDIT: (Activity.CHECK_SUMS, Activity.REDO, Activity.REPORT_FAULT),
        Activity.CHECK_SUMS: (Activity.KEEP, Activity.VOTE, Activity.REPORT_FAULT),
        Activity.KEEP: (Activity.VOTE,),
        Activity.VOTE: (Activity.TASKS, Activity.REDO),
        Activity.REDO: (Activity.TASKS,),
        Activity.REPORT_FAULT: (),
    },
    always=Activity.CLOSED,  # a view can be given up at any time
)
