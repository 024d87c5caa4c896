"""Runs the user's script in a worker: its loops, its values, and checks of its promises."""
