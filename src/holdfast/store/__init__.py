"""The checkpoint store: it never shows half a checkpoint and never returns a wrong byte."""
