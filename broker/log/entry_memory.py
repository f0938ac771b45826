"""What an entry of the log takes of Redis's memory: what `broker.max_log_bytes` bounds.

Allocators round sizes up, to a quarter of a power of two at most (jemalloc; others take less). A header lies
in a node of the stream, whose last part stays empty. Keys, the entry's other fields and its place in the
tables have a fixed size. `tests/contract/test_entry_memory.py` holds the sum against what servers really use.
"""

import math
from typing import Final

ENTRY_OVERHEAD_BYTES: Final = 256
_LEAST_STEP: Final = 16


def entry_bytes(payload: int, header: int) -> int:
    """Return the bytes of an entry whose payload and encoded header have so many."""
    step = max(_LEAST_STEP, (1 << (payload + 15).bit_length()) // 8)
    return -(-(payload + 16) // step) * step + math.ceil(header * 1.25) + ENTRY_OVERHEAD_BYTES
