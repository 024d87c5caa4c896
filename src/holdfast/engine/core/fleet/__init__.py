"""Decides which nodes a job asks a cluster manager for, and which it gives back. Pure.

fleet.py compares the manager's list with the nodes that the coordinator knows. It learns
everything from these two, so it can be killed at any time. Its driver owes it:

    Request           RequestAnswered follows. The same id may be asked for again when an answer was
                      lost, and must never become a second placement
    ReleasePlacement  the manager ends the placement; ordered again until it is gone
    DrainNode         the job leaves the node at a step boundary; ordered again until it reports so
    LabelNode         the job learns a node's failure domains; ordered again until it knows them
    Note              a line for people
    Finished          the driver ends: the manager has no placement of the job any more

The fleet draws no conclusion from a failed listing: a manager that is away has ended no node.
"""
