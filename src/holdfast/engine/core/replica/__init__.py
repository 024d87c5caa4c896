"""Decides how a member obtains the job's state, keeps it, and gives it to other members. Pure.

A replica consists of the whole state after some step, and of the reduced gradients since. Its
sources and sinks are named in ground/events.py, and its orders have six forms (ground/effects.py):

    ObtainState  load a state from a source; StateObtained or ObtainFailed follows
    ObtainStep   take the reduced gradient of a step from a source; StepObtained or ObtainFailed
                 follows
    CopyState    copy a share of the state for a sink; StateCopied follows, and then the script may
                 change it again
    KeepStep     keep a piece of a reduced gradient for a sink; of the nodes' memory, StepKept
                 follows, and only then may the worker vote for the step
    Forget       drop what a sink does not need any more
    Follow       take in what members send by an order, from now on

A state counts for a later recall only once the next step was committed in its view: by then all
members have compared it.
"""
