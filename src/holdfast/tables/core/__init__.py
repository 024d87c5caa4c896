"""Decides where rows of tables are, how far each server is, and whom to ask for rows. Pure.

Every process computes the same placement from the layout alone (placement.py). Each server has a
machine (holdings.py): which updates each of its shards has had, which shards it lacks, and which
servers have these. Each worker has a machine for a read (reading.py): whom to ask for which
shards, what to do with servers that are behind, silent or wrong, and whose rows to believe; and one
for servers that are new (heirs.py): which of them have all rows by now. lab/sim/table_servers.py
drives them with every fault, next to the right answer to each read.
"""
