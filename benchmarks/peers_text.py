"""The words of the sheet of `make bench-peers`: how each peer was set up, and what that means."""

BEFORE = ()
AFTER = ()
