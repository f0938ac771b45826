"""How long a policy server may take to end; what ends it by force waits for so long."""

from typing import Final

CALLS_S: Final = 5.0
"""Longest wait for open calls at the end, in seconds.

A call takes milliseconds; what is still open after this long is a stream whose client does not close it.
"""
FLUSH_S: Final = 10.0
"""Longest wait for the acknowledgement of what was learned, in seconds."""
LEAVING_S: Final = 1.0
"""For all that has no bound of its own, such as the end of the interpreter."""
SERVER_GONE_S: Final = CALLS_S + FLUSH_S + LEAVING_S
"""By when a policy server has ended, in seconds since it was asked to."""
