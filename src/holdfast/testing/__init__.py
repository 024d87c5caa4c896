"""The shipped test kit: real runs to hurt, contract suites for the seams."""
