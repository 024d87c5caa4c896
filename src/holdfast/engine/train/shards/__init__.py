"""Lets several processes be one worker, each with a shard of the model."""
