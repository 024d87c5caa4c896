"""Whether bytes become shorter, found out on a sample; and shorter they are (Zstandard).

Weights and moments in full use hardly shrink, and cost more time to compress than to write; what is
mostly zeros, repeats, or counts shrinks to little. Only the second kind is compressed.
"""

from __future__ import annotations

import zstandard

LEVEL = 1
SIZE_MIN = 4096  # bytes of an entry; fewer are not worth a look
SAMPLES = 4  # evenly over the entry
SAMPLE_BYTES = 16 << 10
PAYS = 0.5  # of its size, to which an entry's samples must shrink
SHORTER = 0.9  # of its size, for a chunk to be stored so


def pays(data: memoryview) -> bool:
    """Whether an entry of these bytes should be compressed."""
    if len(data) < SIZE_MIN:
        return False
    size = min(SAMPLE_BYTES, len(data) // SAMPLES)
    gap = (len(data) - size) // (SAMPLES - 1)
    sample = b"".join(data[i * gap : i * gap + size] for i in range(SAMPLES))
    return len(_compressor().compress(sample)) <= PAYS * len(sample)


def shorter(chunk: memoryview) -> bytes | memoryview:
    """The chunk compressed; itself, where that is not much shorter."""
    found = _compressor().compress(chunk)
    return found if len(found) <= SHORTER * len(chunk) else chunk


def expand(data: memoryview, into: memoryview) -> str:
    """Fill `into` with what was compressed; returns why that is impossible, if it is."""
    try:
        size = zstandard.frame_content_size(data)  # before so much memory is taken
        if size != len(into):
            return f"it has {size} bytes, decompressed, and not {len(into)}"
        into[:] = zstandard.ZstdDecompressor().decompress(data)
    except (zstandard.ZstdError, ValueError) as error:
        return f"it cannot be decompressed: {error}"
    return ""


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL)
