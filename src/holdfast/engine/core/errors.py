"""Defines every exception that Holdfast raises on purpose.

HoldfastError
|-- UserError           the user can mend it: the message names the offending value and what to do
|   |-- NoAnswer        no coordinator answers a command: it ended, or is out of reach
|   |-- StateMismatch   a protected object cannot take the job's state
|   `-- ScriptFault     the script makes workers compute different results
|-- WorldError          a machine, network or disk failed; normally survived, never a bug
|   |-- Aborted         the process group of a view was broken or given up
|   |-- WireError       a frame that is malformed, too large, unauthenticated or of another version
|   |   `-- OtherJob    the other side knows the secret and is of another job
|   |-- Damaged         stored bytes differ from those written
|   |   `-- OtherRelease   they are whole, but written by another release of Holdfast
|   |-- Unreachable     no server of a service carried out a request in time
|   |-- Refused         a service is there and declines a request
|   `-- Deposed         this coordinator's term is over: another may lead
`-- InvariantError      our own bug: carries the expected and the actual value

It also names this release, and words the refusal of files that a newer release has written. The
magic word of a file is its name and one digit, its format. Whatever else a newer release changes,
its files keep the magic word's name and the digest of this release.
"""

from __future__ import annotations

from typing import NoReturn


class HoldfastError(Exception):
    """Stands at the root of the tree above."""


class UserError(HoldfastError):
    """Reports bad input, in one sentence with the offending value and the next action."""


class NoAnswer(UserError):
    """Reports a run whose coordinator does not answer. `problem`: why, as a sentence."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: is the job running?")
        self.problem = problem


class StateMismatch(UserError):
    """Reports that a protected object's shapes, names or types differ from the job's."""


class ScriptFault(UserError):
    """Reports a script that makes the workers of one job compute different results."""


class WorldError(HoldfastError):
    """Reports that a machine, network or disk failed."""


class Aborted(WorldError):
    """Reports that the process group of a view cannot be used any more.

    `rank`: the member at the other end of the connection that has failed, if it is one.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class WireError(WorldError):
    """Refuses a frame that must not be trusted; the connection is closed."""


class OtherJob(WireError):
    """Reports that the other side has proved to belong to another job, `met`."""

    def __init__(self, message: str, met: str) -> None:
        super().__init__(message)
        self.met = met


class Damaged(WorldError):
    """Reports that stored bytes must not be trusted; the message gives the reason."""


class OtherRelease(Damaged):
    """Reports that stored bytes are whole, but written by another release of Holdfast."""


class Unreachable(WorldError):
    """Reports that no server has answered; the request may have been carried out."""


class Refused(WorldError):
    """Reports that the service declined; asking again has no effect by itself."""


class Deposed(WorldError):
    """Keeps a coordinator from acting that is not sure to be the leader."""


class InvariantError(HoldfastError):
    """Reports that Holdfast broke its own rules: please file it with the message."""


def assert_never(value: NoReturn) -> NoReturn:
    """Mark the last branch of a match, like typing.assert_never, which Python 3.10 lacks."""
    raise InvariantError(f"unhandled {value!r}")


def require(condition: bool, message: str) -> None:
    """Raise InvariantError unless `condition`; unlike assert, never compiled away."""
    if not condition:
        raise InvariantError(message)


def first_line(error: BaseException) -> str:
    """Return the message of another library's error, without its stack or advice."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---------------------------------------------------------------- files of other releases

RELEASE = "0.2.0"  # the only place: pyproject.toml reads it from here


def newer_format(data: bytes, magic: bytes) -> str:
    """Return the end of a sentence on a newer format's file, by its magic word; else empty."""
    name, known, found = magic[:-1], magic[-1:], data[len(magic) - 1 : len(magic)]
    if data[: len(name)] != name or not found.isdigit() or int(found) <= int(known):
        return ""
    return describe_newer_writer(int(found), int(known))


def describe_newer_writer(found: int, known: int) -> str:
    """Return the end of a sentence about a file whose format this release does not know."""
    return (
        f"was written by a newer Holdfast (format {found}); this one reads format {known}: upgrade"
    )
