"""The garbage collector while a service starts, when nearly all that is made stays, and of what stays.

Imports make some 300,000 objects. Python's collector looks at the young ones after every 700, and at all of
them four or five times, which is a tenth of a learner's start.
"""

import gc
from typing import Final

MANY_OBJECTS: Final = 20_000
"""Number of new objects after which the collector runs."""
_USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Collect only after MANY_OBJECTS new objects: where objects live long, or hold no cycles."""
    gc.set_threshold(MANY_OBJECTS, *_USUAL[1:])


def collect_as_usual() -> None:
    """Undo `collect_seldom` without collecting: a cycle that holds much memory must not wait for long."""
    if gc.get_threshold()[0] == MANY_OBJECTS:
        gc.set_threshold(*_USUAL)


def leave_out_what_stays() -> None:
    """Collect once, and never again look at what is left.

    To look at all that a gateway's start has made holds up every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
