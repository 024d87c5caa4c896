"""Erasure codes over byte buffers. It knows no files and no networks."""
