"""Keeps a node's own job, and notices if another job has taken its coordinator's place.

Jobs can share a secret and an address. When the machine of the first one's coordinator dies, its
agents wait at that address; a job that is begun there next is none of theirs.
"""

from __future__ import annotations


class OwnJob:
    """Keeps the job of one node, which never changes once it is known.

    `other`: the job that was met in its place; empty if none was. `ended`: whether the node has
    learnt, without its coordinator, that the job is over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.other = ""
        self.ended = False

    @property
    def is_gone(self) -> bool:
        """Return whether orders of this node's own job can never come again."""
        return self.ended or self.other != ""

    def meet(self, job: str) -> bool:
        """Take in whose coordinator was reached; return whether it is this node's own.

        A node that is of no job yet is of the first one that it meets.
        """
        self._name = self._name or job
        if job and job != self._name:
            self.other = job
        return not self.other

    @property
    def problem(self) -> str:
        """Return why the node's agent ends, for a person; empty if no other job was met."""
        if not self.other:
            return ""
        return (
            f"this node is of job {self._name}, whose coordinator is gone, and job {self.other} is "
            "at its address now: its workers are ended; start the node again to have it in that job"
        )
