"""Sets limits for connections that have not proved themselves: how many there are, and how long.

All listeners share these rules. There is no clock and no socket here: callers pass the time, and
close the connections that are returned to them. Complaints about strangers do not flood a log: the
first lines are written, all further ones only counted in a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Entry:
    host: str
    until: float
    proof_s: float


class Strangers(Generic[T]):
    """Keeps the connections that have not proved themselves, at most `strangers_max` of them.

    When one too many comes, the address with the most connections loses its oldest. So a flood from
    one address shuts no other out, and a peer that proves itself quickly gets in even from there.
    Each method returns the connections to close, with the reason; they are already forgotten.
    """

    def __init__(self, strangers_max: int) -> None:
        self._strangers_max = strangers_max
        self._entries: dict[T, _Entry] = {}  # oldest first
        self._counts: Counter[str] = Counter()  # connections by host

    def __len__(self) -> int:
        return len(self._entries)

    def list_all(self) -> list[T]:
        """Return all of them, the oldest first."""
        return list(self._entries)

    def enter(self, stranger: T, host: str, now: float, proof_s: float) -> list[tuple[T, str]]:
        """Add a connection from `host`, which has `proof_s` for its whole proof."""
        full = len(self._entries) >= self._strangers_max
        closed = self.make_room() if full else []
        self._entries[stranger] = _Entry(host, now + proof_s, proof_s)
        self._counts[host] += 1
        return closed

    def leave(self, stranger: T) -> None:
        """Forget a connection, if it is here: it has proved itself, or it is closed."""
        entry = self._entries.pop(stranger, None)
        if entry is None:
            return
        self._counts[entry.host] -= 1
        if not self._counts[entry.host]:
            del self._counts[entry.host]

    def make_room(self) -> list[tuple[T, str]]:
        """Give up the oldest connection of the address that has the most."""
        if not self._entries:
            return []
        count, most = len(self._entries), max(self._counts.values())
        oldest = next(s for s, entry in self._entries.items() if self._counts[entry.host] == most)
        self.leave(oldest)
        return [(oldest, f"too many connections have not proved themselves: {count}")]

    def expire(self, now: float) -> list[tuple[T, str]]:
        """Give up the connections whose time for the proof is over."""
        late = [(s, entry.proof_s) for s, entry in self._entries.items() if entry.until <= now]
        for stranger, _ in late:
            self.leave(stranger)
        return [(s, f"it did not finish the handshake in {proof_s:g} s") for s, proof_s in late]

    def deadline(self) -> float | None:
        """Return when `expire` is due; None without strangers."""
        return min((entry.until for entry in self._entries.values()), default=None)


class Complaints:
    """Writes at most `lines_max` lines in every `window_s`, and one line that counts the rest.

    The caller passes the time and calls `flush` at the deadline.
    """

    def __init__(
        self, say: Callable[[str], None], lines_max: int = 10, window_s: float = 10.0
    ) -> None:
        self.window_s = window_s
        self._say = say
        self._lines_max = lines_max
        self._lines = 0  # written in the present window
        self._held = 0
        self._last = ""
        self._ends_at: float | None = None  # when the present window ends; None: none is open

    def deadline(self) -> float | None:
        """Return when `flush` is due; None while no line is held back."""
        return self._ends_at

    def add(self, text: str, now: float) -> None:
        self.flush(now)
        if self._ends_at is None:
            self._ends_at = now + self.window_s
        if self._lines < self._lines_max:
            self._lines += 1
            self._say(text)
        else:
            self._held += 1
            self._last = text

    def flush(self, now: float, force: bool = False) -> None:
        """Close the window if it is over (or `force`), and report the lines that it held back."""
        if self._ends_at is None or (now < self._ends_at and not force):
            return
        if self._held:
            self._say(f"and {self._held} more in {self.window_s:g} s, the last: {self._last}")
        self._lines, self._held, self._last, self._ends_at = 0, 0, "", None
