"""How much of a contended core a thread takes.

A process that lowers its priority cannot raise it again without a privilege. Linux gives each thread a
niceness of its own, so what should give way is done by a thread that was started for it.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread by `niceness`, 0 to 19; elsewhere than on Linux do nothing."""
    if sys.platform == "linux":
        os.nice(niceness)


def giving_way(work: Callable[[], Result], niceness: int) -> Result:
    """Return what `work` returns, or raise what it raises; a thread calls it whose priority is lower.

    niceness: as for `give_way`. The calling thread waits, and keeps its priority.
    """
    with ThreadPoolExecutor(1, "giving-way", initializer=partial(give_way, niceness)) as thread:
        return thread.submit(work).result()
