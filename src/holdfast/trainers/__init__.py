"""Trainers that people have, made to train on the job's steps: each module needs one package.

No other part of Holdfast imports them. All state that matters is protected, as in any script: a
worker that joins runs the script from its first line and receives the rest in its first loop.
"""
