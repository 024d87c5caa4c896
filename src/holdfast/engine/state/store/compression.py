"""Decides on a sample whether bytes would shrink, and compresses them with Zstandard if so.

Weights and moments in full use hardly shrink, and cost more time to compress than to write; bytes
that are mostly zeros, repeats or counts shrink to little. Only the second kind is compressed.
"""

from __future__ import annotations

import zstandard

LEVEL = 1
SIZE_MIN = 4096  # bytes of an entry; smaller ones are not compressed
SAMPLES = 4  # spread evenly over the entry
SAMPLE_BYTES = 16 << 10
PAYS = 0.5  # share of its size to which an entry's samples must shrink
SHORTER = 0.9  # share of its size to which a chunk must shrink


def is_worthwhile(data: memoryview) -> bool:
    """Return whether an entry of these bytes should be compressed."""
    if len(data) < SIZE_MIN:
        return False
    size = min(SAMPLE_BYTES, len(data) // SAMPLES)
    gap = (len(data) - size) // (SAMPLES - 1)
    sample = b"".join(data[i * gap : i * gap + size] for i in range(SAMPLES))
    return len(_compressor().compress(sample)) <= PAYS * len(sample)


def shorten(chunk: memoryview) -> bytes | memoryview:
    """Return the chunk compressed, or unchanged if that would not make it much shorter."""
    found = _compressor().compress(chunk)
    return found if len(found) <= SHORTER * len(chunk) else chunk


def expand(data: memoryview, into: memoryview) -> str:
    """Decompress into `into`; return why that is impossible, or an empty string."""
    try:
        size = zstandard.frame_content_size(data)  # checked before so much memory is taken
        if size != len(into):
            return f"it has {size} bytes, decompressed, and not {len(into)}"
        into[:] = zstandard.ZstdDecompressor().decompress(data)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        return f"it cannot be decompressed: {error}"
    return ""


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL)
