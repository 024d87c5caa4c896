"""Puts together the machines that decide for one worker: membership, replica and step."""
