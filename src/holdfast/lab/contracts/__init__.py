"""Contains the shipped test kit: real runs to disturb, and contract suites for the seams."""
