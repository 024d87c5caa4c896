"""Has the commands that show what runs have written."""
