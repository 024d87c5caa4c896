"""The coordinator process, its journal and its election."""
