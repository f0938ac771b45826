"""How the threads of a process share the interpreter."""

import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005


def share_interpreter() -> None:
    """Have a thread that computes give way to one that waits after half a millisecond; call once, early.

    Python's own 5 ms are longer than an actor's step and several of a learner's gradient steps, and a thread
    that calls Redis or a broker has to get the interpreter back after each call.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
