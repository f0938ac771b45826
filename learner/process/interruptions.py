"""What may interrupt the loop between two updates: an error of another thread, an operator, a drain."""

import threading
from dataclasses import dataclass
from typing import Final

from penstock.learner.lease import LeaseKeeper
from penstock.learner.thread_group import ThreadGroup
from penstock.protocol.messages import RunState

_WAIT_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """lease: its newest renewal tells what operators want. draining: set when the process is asked to end."""

    threads: ThreadGroup
    lease: LeaseKeeper
    draining: threading.Event

    def check(self) -> None:
        """Raise the first error of any thread."""
        self.threads.check()

    @property
    def is_draining(self) -> bool:
        """Whether this process, though not the run, is asked to end."""
        return self.draining.is_set()

    @property
    def is_stopping(self) -> bool:
        """Whether an operator has stopped the run."""
        return self.lease.renewal.desired is RunState.STOPPING

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused the run."""
        return self.lease.renewal.desired is RunState.PAUSED

    def wait(self) -> None:
        """Wait a moment before looking again; a drain ends the wait."""
        self.draining.wait(_WAIT_S)
