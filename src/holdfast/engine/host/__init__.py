"""Examines and watches the machine that an agent is on, and starts and ends processes there."""
