"""Every exception that Holdfast raises on purpose.

HoldfastError
|-- UserError           the user can mend it: the message names the offending value and what to do
|   `-- StateMismatch   a protected object cannot take the job's state
|-- WorldError          a machine, network or disk failed; normally survived, never a bug
|   |-- Aborted         the process group of a view was broken or given up
|   |-- WireError       a frame that is malformed, too large, unauthenticated or of another version
|   |-- Damaged         stored bytes are not what was written
|   |-- Unreachable     no server of a service carried out a request in time
|   |-- Refused         a service is there and will not do what it was asked
|   `-- Deposed         this coordinator's term is over: another may be in office
`-- InvariantError      our own bug: carries what was expected and what was found
"""

from __future__ import annotations

from typing import NoReturn


class HoldfastError(Exception):
    """The root of the tree above."""


class UserError(HoldfastError):
    """Bad input: one sentence with the offending value and the next action."""


class StateMismatch(UserError):
    """A protected object's shapes, names or types differ from the job's."""


class WorldError(HoldfastError):
    """A machine, network or disk failed."""


class Aborted(WorldError):
    """The process group of a view cannot be used any more."""


class WireError(WorldError):
    """A frame that must not be believed; the connection is closed."""


class Damaged(WorldError):
    """Stored bytes that must not be believed; the message says what is wrong with them."""


class Unreachable(WorldError):
    """Every server was tried until the time was up; the request may have been carried out."""


class Refused(WorldError):
    """The service answered that it will not; asking again changes nothing by itself."""


class Deposed(WorldError):
    """A coordinator that cannot be sure to be in office must not act any more."""


class InvariantError(HoldfastError):
    """Holdfast broke its own rules: please report it with the message."""


def assert_never(value: NoReturn) -> NoReturn:
    """For the last branch of a match: typing.assert_never, which Python 3.10 lacks."""
    raise InvariantError(f"unhandled {value!r}")


def require(condition: bool, message: str) -> None:
    """Raise InvariantError unless `condition`; unlike assert, never compiled away."""
    if not condition:
        raise InvariantError(message)


def first_line(error: BaseException) -> str:
    """What another library says of its error, without its stack or advice."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
