"""Decides which nodes a job asks a cluster manager for, and which it gives back. Pure."""
